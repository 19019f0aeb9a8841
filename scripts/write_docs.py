"""Generate docs/cli.md from `--help`, docs/settings.md from the config's records, docs/api.md from the docstrings, the table of
confidences in docs/hangs.md, and the reports in docs/verdicts/.

Tests hold the pages to the code.

python -m scripts.write_docs
"""

from __future__ import annotations

from tools.docs import api_docs, cli_docs, confidence_docs, settings_docs, verdict_docs
from tools.paths import DOCS

if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_docs.reference())
    (DOCS / "settings.md").write_text(settings_docs.reference())
    (DOCS / "api.md").write_text(api_docs.reference())
    hangs = DOCS / "hangs.md"
    hangs.write_text(confidence_docs.with_table(hangs.read_text()))
    for page in verdict_docs.PAGES.glob("*.md"):
        page.write_text(verdict_docs.with_reports(page.read_text()))
