"""The documentation builds as a site: every page is in the menu, every link leads somewhere, nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.version import __version__
from tools.docs.verdict_docs import PAGES, recordings, with_reports
from tools.paths import ROOT

LOADED = re.compile(
    r"<(?:script|img|source|iframe)[^>]*\bsrc=\"([^\"]+)\"|<link[^>]*rel=\"(?:stylesheet|icon|preconnect)\"[^>]*>"
)
TODO_LIST = re.compile(r"<p>(?:[-*]|\d+\.) ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_site_names_its_version(site: Path) -> None:
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert len(pages) >= 60
    assert all(f"titan-ckpt {__version__}" in page for page in pages)


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        for match in LOADED.finditer(page.read_text()):
            assert "//" not in match.group(), f"{page.name} loads {match.group()}"


def test_lists_are_lists_on_the_site_too(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not TODO_LIST.search(page.read_text()), f"{page.name}: a list without an empty line before it"


def test_the_search_finds_a_verdict(site: Path) -> None:
    assert "SCHEDULED_NOT_STARTED" in (site / "search" / "search_index.json").read_text()


def test_each_verdict_has_a_page_with_an_incident() -> None:
    index = (PAGES / "README.md").read_text()
    for kind in VerdictKind:
        page = (PAGES / f"{kind}.md").read_text()
        assert recordings(page)
        assert all(part in page for part in ("## How one recognises it", "## What to do", "## Easily confused with"))
        assert f"]({kind}.md)" in index


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_a_verdicts_page_shows_todays_report(kind: VerdictKind) -> None:
    page = (PAGES / f"{kind}.md").read_text()
    assert with_reports(page) == page, "run `make docs`"
    assert re.search(rf"^```\n{kind}\b", page, re.MULTILINE)
