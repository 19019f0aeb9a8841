"""What must hold before a release, and of what was built. Each check returns the problems it finds."""

from __future__ import annotations

import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.metadata import Metadata

from tools.quick_tests import source_files

NOT_IN_SDIST = {".git-blame-ignore-revs"}


def project_problems(root: Path, version: str) -> Iterator[str]:
    """The changelog, the citation and the addresses."""
    changelog = (root / "CHANGELOG.md").read_text()
    heading = re.search(rf"^## {re.escape(version)} - (.*)$", changelog, re.MULTILINE)
    if heading is None:
        yield f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD`"
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        yield f"CHANGELOG.md dates {version} {heading[1]!r}: expected YYYY-MM-DD"
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        yield f"CITATION.cff has another version than titan_ckpt/version.py ({version})"
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"].values()
    if placeholders := [url for url in urls if re.match(r"https://[^/]*\.example/", url)]:
        yield f"project.urls in pyproject.toml are placeholders: {min(placeholders)} ..."


def git_problems(root: Path, version: str) -> Iterator[str]:
    """The tag must be free and the tree clean."""
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists: set the next version in titan_ckpt/version.py"
    if changed := _git(root, "status", "--porcelain"):
        yield f"the work tree is not clean: {len(changed.splitlines())} files are changed or not added"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def sdist_problems(root: Path, sdist: Path) -> Iterator[str]:
    """The source archive must hold every file and link of the project, and valid metadata."""
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].partition("/")[0]
        held = {name.removeprefix(f"{top}/") for name in archive.getnames()}
        info = archive.extractfile(f"{top}/PKG-INFO")
        assert info is not None
        yield from _metadata_problems(sdist, info.read())
    missing = {str(path) for path in source_files(root)} - held - NOT_IN_SDIST
    if missing:
        yield f"{sdist.name} lacks {len(missing)} files: {', '.join(sorted(missing)[:5])} ..."


def wheel_problems(wheel: Path) -> Iterator[str]:
    """A wheel must hold one top-level package, its type marker and licence, and valid metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (folder,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        yield from _metadata_problems(wheel, archive.read(f"{folder}/METADATA"))
    if extra := {name.partition("/")[0] for name in names} - {"titan_ckpt", folder}:
        yield f"{wheel.name} adds more than titan_ckpt to site-packages: {', '.join(sorted(extra))}"
    for wanted in ("titan_ckpt/py.typed", f"{folder}/licenses/LICENSE"):
        if wanted not in names:
            yield f"{wheel.name} lacks {wanted}"


def _metadata_problems(archive: Path, text: bytes) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        yield from (f"{archive.name}: {error}" for error in group.exceptions)
        return
    if metadata.description_content_type != "text/markdown" or not metadata.description:
        yield f"{archive.name}: the long description is empty or not Markdown"
    if str(metadata.version) not in archive.name:
        yield f"{archive.name}: its metadata has version {metadata.version}"
