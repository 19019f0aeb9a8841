"""A Python that this machine lacks, from Debian's packages, in a system of its own folder that `chroot` enters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.matrix.cells import ROOT, Cell, State
from tools.quick_tests import copy_sources

SUITE = "sid"  # which has the newest Python
NEEDED = ("python3-pip", "gcc", "g++", "git", "ca-certificates")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
LIMIT_S = 3600.0


def cells_of(minor: str, folder: Path, words: Sequence[str]) -> list[Cell]:
    """The cells of `python3.X` in a Debian below `folder`, which is made if it is not there; `words`: of the command line.

    One cell that says why if it cannot be made: debootstrap is missing, the user is not root, Debian has no such Python.
    """
    root = folder / f"debian-{minor}"
    if (why := _lacking()) or (why := _make(minor, root)):
        return [Cell(python=minor, torch="any", state=State.LEFT_OUT, detail=why)]
    copy_sources(ROOT, root / "work", compiled=False)
    if CERTIFICATES.exists():  # those that this machine trusts, which a company's registry may need
        shutil.copy2(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    (root / "cells.json").unlink(missing_ok=True)  # of an earlier run
    command = [f"python{minor}", "-m", "tools.matrix", "--python", minor, "--json", "/cells.json", *words]
    inside = ["chroot", str(root), "sh", "-c", 'cd /work && exec "$@"', "sh", *command]
    subprocess.run(
        inside,
        env={**os.environ, "PIP_CERT": str(CERTIFICATES), "HOME": "/root"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    try:
        rows = json.loads((root / "cells.json").read_text())
    except (OSError, ValueError):
        return [Cell(python=minor, torch="any", state=State.FAILED, detail=f"the matrix wrote no cells in {root}")]
    return [Cell(**{**row, "state": State(row["state"])}) for row in rows]


def _lacking() -> str:
    """Why no such system can be made here; "" if one can."""
    if shutil.which("debootstrap") is None:
        return "this Python is not on this machine, and debootstrap, which would fetch it, is missing"
    return "" if os.geteuid() == 0 else "this Python is not on this machine; root could fetch it (debootstrap, chroot)"


def _make(minor: str, root: Path) -> str:
    """Install Debian with that Python; "" if it is there then, else what went wrong."""
    program = root / "usr" / "bin" / f"python{minor}"
    if program.exists():
        return ""
    packages = ",".join((f"python{minor}", f"python{minor}-venv", f"python{minor}-dev", *NEEDED))
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if done.returncode == 0 and program.exists():
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return f"debootstrap did not install it: {lines[-1] if lines else f'exit code {done.returncode}'}"
