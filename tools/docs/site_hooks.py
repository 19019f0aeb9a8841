"""mkdocs hooks: the version in the header, pages that the menu lacks, and links from docs/ to the rest of the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from titan_ckpt.version import __version__

_OUTSIDE = re.compile(r"(\]\()\.\./(?=[\w.])")


def on_config(config: Any) -> Any:
    """Name the version that the pages describe, and put pages that the menu does not name at its end."""
    config.site_name = f"{config.site_name} {__version__}"
    named, folder = json.dumps(config.nav), Path(config.docs_dir)
    pages = sorted(str(page.relative_to(folder)) for page in folder.rglob("*.md"))
    if others := [page for page in pages if f'"{page}"' not in named]:
        config.nav.append({"More": others})
    return config


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """A link that leaves docs/ leads to the file on the forge."""
    return _OUTSIDE.sub(rf"\1{config.repo_url}/blob/main/", markdown)
