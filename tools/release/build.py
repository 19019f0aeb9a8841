"""Build the archives from the source archive alone, and try them in a new environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.quick_tests import QUICK, copy_sources

SMOKE = """
import sys, importlib.util
import titan_ckpt, titan_ckpt.debug, titan_ckpt.tui, titan_ckpt.converters
assert importlib.util.find_spec("torch") is None
assert titan_ckpt.__version__ == sys.argv[1], titan_ckpt.__version__
assert "site-packages" in titan_ckpt.__file__, titan_ckpt.__file__
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archives:
    """What a release consists of."""

    sdist: Path
    wheel: Path
    pure_wheel: Path


def build(root: Path, work: Path, dist: Path) -> Archives:
    """The source archive from a copy of the project, both wheels from the unpacked source archive."""
    shutil.rmtree(dist, ignore_errors=True)
    copy_sources(root, work / "copy", compiled=False)
    _build(work / "copy", dist, "--sdist")
    (sdist,) = dist.glob("*.tar.gz")
    source = unpack(sdist, work)
    _build(source, dist, "--wheel")
    _build(source, dist, "--wheel", TITAN_CKPT_PURE="1")
    (pure,) = dist.glob("*-none-any.whl")
    others = [path for path in dist.glob("*.whl") if path != pure]
    return Archives(sdist=sdist, wheel=others[0] if others else pure, pure_wheel=pure)


def unpack(sdist: Path, work: Path) -> Path:
    """The folder of the unpacked source archive."""
    shutil.rmtree(work / "unpacked", ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (source,) = (work / "unpacked").iterdir()
    return source


def smoke_test(wheel: Path, version: str, source: Path, work: Path) -> None:
    """Install the wheel in a new environment without torch; import it and run commands."""
    python = _new_environment(work / "venv")
    _run([python, "-m", "pip", "install", "-qq", "-c", source / "constraints.txt", wheel], work)
    _run([python, "-c", SMOKE, version], work)
    for command in (["--version"], ["verify", "--data", source / "tests" / "data" / "golden" / "v1"]):
        _run([python, "-m", "titan_ckpt", *command], work)


def test_source_archive(source: Path, work: Path) -> None:
    """Install the unpacked source archive with its development tools, and run its quick tests."""
    python = _new_environment(work / "venv-tests")
    pip: list[str | Path] = [python, "-m", "pip", "install", "-qq", "-c", source / "constraints.txt"]
    _run([*pip, "torch"], source)
    _run([*pip, "-e", ".[dev]"], source)
    _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", QUICK], source)


def _new_environment(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", folder], folder.parent)
    return folder / "bin" / "python"


def _build(source: Path, dist: Path, what: str, **variables: str) -> None:
    _run([sys.executable, "-m", "build", "--no-isolation", what, "--outdir", dist, source], source, **variables)


def _run(command: Sequence[str | Path], folder: Path, **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    words = list(map(str, command))
    sys.stderr.write(f"$ {' '.join(words).partition(chr(10))[0][:150]}\n")
    quiet = None if "pytest" in words else subprocess.PIPE
    done = subprocess.run(
        words, cwd=folder, env=environment, check=False, stdout=quiet, stderr=quiet and subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"{(done.stdout or '')[-4000:]}\nfailed with exit code {done.returncode}: {' '.join(words)}")
