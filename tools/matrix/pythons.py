"""The Pythons of this machine, and what their registries give as torch."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OLDEST, NEWEST = 11, 14
"""Minor versions of Python 3 to look for."""
PROBE = "import ensurepip, sys, venv; print('%d.%d.%d' % sys.version_info[:3])"


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    """An interpreter that can make environments."""

    program: str
    version: str

    @property
    def minor(self) -> str:
        """The version without its last part: `3.11`."""
        return self.version.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """A torch that pip would install."""

    version: str
    is_cuda: bool


def find_pythons() -> tuple[list[Python], list[str]]:
    """One interpreter per minor version, and the versions of which none starts or has venv."""
    found, missing = [], []
    for minor in range(OLDEST, NEWEST + 1):
        candidates = (python for program in _programs(minor) if (python := _probe(program)))
        if (first := next(candidates, None)) and first.minor == f"3.{minor}":
            found.append(first)
        else:
            missing.append(f"3.{minor}")
    return found, missing


def _programs(minor: int) -> Iterator[str]:
    """Names to try: on the path first, then pyenv's versions that its shims do not start."""
    yield f"python3.{minor}"
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3.{minor}"), reverse=True))


def _probe(program: str) -> Python | None:
    try:
        done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Python(program=program, version=done.stdout.strip()) if done.returncode == 0 else None


def torch_versions(python: str, oldest: str) -> list[str]:
    """Versions of torch from `oldest` on that the registry has for this interpreter, newest first."""
    done = subprocess.run(
        [python, "-m", "pip", "index", "versions", "torch"], capture_output=True, text=True, check=False
    )
    listed = re.search(r"Available versions: (.*)", done.stdout)
    versions = [text.partition("+")[0] for text in listed.group(1).split(", ")] if listed else []
    return [version for version in dict.fromkeys(versions) if _key(version) >= _key(oldest)]


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def torch_build(python: str, version: str) -> TorchBuild | None:
    """What pip would install for `torch==version`; nothing is downloaded but its metadata.

    A CUDA build requires NVIDIA's packages, several GB of them; a CPU build does not.
    """
    command = [python, "-m", "pip", "install", "-qq", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary", ":all:", "--report", "-", f"torch=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    metadata = json.loads(done.stdout)["install"][0]["metadata"]
    needs = metadata.get("requires_dist", [])
    return TorchBuild(version=metadata["version"], is_cuda=any(re.match(r"nvidia|cuda", need) for need in needs))
