"""Environments of their own for tools whose libraries are not installed: the installed packages, torch included, and these."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment_with(libraries: Sequence[str], folder: Path) -> str:
    """The Python of the environment in `folder`, made when it is first asked for."""
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    packages = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    own = next(Path(folder, "lib").glob("python*/site-packages"))
    (own / "zz_base.pth").write_text(f"{packages}\n")
    torch = f"torch=={importlib.metadata.version('torch')}"  # the installed one
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *libraries, torch]
    subprocess.run(pip, check=True)
    (folder / "ready").touch()
    return str(python)
