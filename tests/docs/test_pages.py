"""The commands in the README and tutorial work and print what the pages show; links resolve; figures are measured."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.doc_blocks import blocks, check_command, commands, first_difference, run
from titan_ckpt.demo.s3_server import Server
from tools.paths import DOCS, ROOT

README, TUTORIAL = ROOT / "README.md", DOCS / "tutorial.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
WEB = "https://a-seed-9df771d3.example/titan-ckpt/"  # where README's links lead, since an index shows it without the repository
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(?:\$ )?((?:titan-ckpt|python -m|make|pip) .*)", re.MULTILINE)
LIMIT_S = 900
FIGURE = re.compile(r"\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder left by the README's code blocks."""
    folder = tmp_path_factory.mktemp("readme")
    assert run(README, folder, {}) >= 5
    return folder


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.hf
@pytest.mark.timeout(LIMIT_S)
def test_every_readme_block_prints_what_the_page_shows(readme: Path) -> None:
    assert (readme / "my-model" / "config.json").exists()


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.hf
def test_tensorboard_reads_the_numbers_of_the_readmes_run(readme: Path) -> None:
    log = EventAccumulator(str(readme / "runs" / "tiny" / "tensorboard"))
    log.Reload()
    losses = log.Scalars("step/loss")
    assert [event.step for event in losses] == list(range(1, 21))
    assert losses[-1].value < losses[0].value


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.s3
@pytest.mark.hf
@pytest.mark.timeout(LIMIT_S)
def test_every_tutorial_block_prints_what_the_page_shows(
    tmp_path: Path, s3_server: Server, s3_environment: dict[str, str]
) -> None:
    s3_server.create_bucket("bucket")
    assert run(TUTORIAL, tmp_path, s3_environment) >= 8


@pytest.mark.e2e
@pytest.mark.hf
@pytest.mark.timeout(LIMIT_S)
def test_every_block_on_finetuning_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert run(DOCS / "finetuning.md", tmp_path, {}) == 3


@pytest.mark.e2e
def test_the_dcp_block_prints_what_the_page_shows(tmp_path: Path) -> None:
    assert run(DOCS / "howto" / "dcp.md", tmp_path, {}) == 1


@pytest.mark.parametrize("page", sorted((DOCS / "howto").glob("*.md")), ids=lambda page: page.name)
def test_every_python_block_imports_names_that_exist(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("titan_ckpt"):
                    source = ast.parse((ROOT / f"{node.module.replace('.', '/')}.py").read_text())
                    defined = {item.name for item in source.body if isinstance(item, ast.ClassDef | ast.FunctionDef)}
                    assert {name.name for name in node.names} <= defined, f"{page.name}:{block.line}: {node.module}"


@pytest.mark.e2e
def test_the_planning_blocks_print_what_the_page_shows(tmp_path: Path) -> None:
    assert run(DOCS / "planning.md", tmp_path, {}) == 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_indented_command_exists(page: Path) -> None:
    text = FENCED.sub("", page.read_text()).replace("\\\n", " ")
    for line in INDENTED.findall(text):
        for argv in (shlex.split(part, comments=True) for part in line.split(" ;")):
            assert (problem := check_command(argv)) is None, f"{page.name}: {argv}: {problem}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_block_exists(page: Path) -> None:
    for block in blocks(page):
        if block.kind in ("bash", "shell"):
            for argv in commands(block):
                assert (problem := check_command(argv)) is None, f"{page.name}:{block.line}: {argv}: {problem}"


def _links(page: Path) -> list[tuple[str, str]]:
    """Text and target of each link; links of the README into the repository as paths in it."""
    return [(text, re.sub(rf"^{WEB}(?:blob|raw)/main/", "", target)) for text, target in LINK.findall(page.read_text())]


def _slug(heading: str) -> str:
    """GitHub's anchor for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _section(page: Path, slug: str) -> str | None:
    for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE):
        if part.startswith("#") and _slug(part.partition("\n")[0].lstrip("#")) == slug:
            return part
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for _, target in _links(page):
        path, _, slug = target.partition("#")
        if "://" not in target:
            found = (page.parent / path) if path else page
            assert found.exists(), f"{page.name}: {target}"
            assert not slug or _section(found, slug) is not None, f"{page.name}: {target}: no such heading"


def test_figures_stand_in_the_sections_they_link_to() -> None:
    performance = DOCS / "performance.md"
    checked = 0
    for page in (README, DOCS / "compared.md"):
        for text, target in _links(page):
            path, _, slug = target.partition("#")
            if path.endswith("performance.md") and slug:
                section = _section(performance, slug) or ""
                for figure in FIGURE.findall(text):
                    checked += 1
                    assert re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]*\d)", section), (
                        f"{page.name} says {text!r}, which {target} does not: it was measured again"
                    )
    assert checked >= 10


def test_the_readme_reads_well_on_a_package_index() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert [target for _, target in LINK.findall(text) if "://" not in target] == []


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("step 20 committed 1.5 MB", "step 20   committed  7.25 MB\n"),
        ("a\n...\nd", "a b c d"),
        ("a\n  ...", "a b c d"),
        ("rank 1 at .../x.py:62", "rank 1 at\n /srv/lib/x.py:7"),
    ],
)
def test_measured_figures_and_gaps_may_differ(page: str, printed: str) -> None:
    assert first_difference(page, printed) is None


@pytest.mark.parametrize(
    ("page", "printed"),
    [("step 20", "step 30"), ("a b", "a b c"), ("a\n...\nd", "a b c"), ("a b", "a"), ("rank 1", "rank 0")],
)
def test_words_and_counts_may_not_differ(page: str, printed: str) -> None:
    assert first_difference(page, printed) is not None
