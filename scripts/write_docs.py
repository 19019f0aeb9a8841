"""Write the pages that come from the code itself: docs/cli.md from `--help`, docs/api.md from the docstrings. Tests compare them.

python -m scripts.write_docs
"""

from __future__ import annotations

from tools.docs import api_docs, cli_docs
from tools.paths import DOCS

if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_docs.reference())
    (DOCS / "api.md").write_text(api_docs.reference())
