"""The tests that need neither other processes, a server nor transformers, and the files they need to run elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

QUICK = "not dist and not s3 and not hf and not e2e"
"""The marker expression; the Makefile has the same."""
GENERATED = (
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    ".*_cache",
    ".hypothesis",
    ".venv*",
    ".matrix",
    ".mutants",
    ".release",
)


def source_files(root: Path) -> Iterator[Path]:
    """Paths below `root` of the files that belong to the project, links included.

    Git lists them in a checkout; in an unpacked source archive it is every file that is not generated.
    """
    if not (root / ".git").exists():
        yield from _walk(root, root)
        return
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    yield from (Path(name) for name in listed.split("\0") if name and os.path.lexists(root / name))


def _walk(folder: Path, root: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if any(path.match(pattern) for pattern in GENERATED):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path, root)
        elif path.suffix not in (".so", ".pyc"):
            yield path.relative_to(root)


def copy_sources(root: Path, target: Path, *, compiled: bool = True) -> None:
    """Copy the project's files, and its compiled ring unless not `compiled`, to `target`, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    rings = [path.relative_to(root) for path in root.glob("debug/record/*.so")] if compiled else []
    for path in [*source_files(root), *rings]:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target / path, follow_symlinks=False)
