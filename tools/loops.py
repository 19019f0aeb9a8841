"""Run the tests of loops whose libraries are not installed, in an environment of their own, `.loops/`.

    python -m tools.loops                 # pytest's options may follow

The environment adds the libraries to the installed packages, torch included. A test that is skipped there is a failure.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.paths import ROOT

FOLDER = ROOT / ".loops"
LIBRARIES = ("torchtitan==0.3.0", "lightning==2.6.6")
TESTS = tuple(f"tests/integrations/test_{name}.py" for name in ("torchtitan", "lightning", "stateful_loader"))


def make_environment() -> str:
    """The Python of the environment, made when it is first asked for."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / "ready").exists():
        return str(python)
    shutil.rmtree(FOLDER, ignore_errors=True)
    packages = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    own = next(Path(FOLDER, "lib").glob("python*/site-packages"))
    (own / "zz_base.pth").write_text(f"{packages}\n")
    torch = f"torch=={importlib.metadata.version('torch')}"  # the installed one; its CPU build omits triton
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *LIBRARIES, torch, "triton"]
    subprocess.run(pip, check=True)
    (FOLDER / "ready").touch()
    return str(python)


def main(arguments: list[str]) -> int:
    """pytest's exit code; 1 if a test was skipped."""
    command = [
        make_environment(),
        "-m",
        "pytest",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=900",
        *TESTS,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    return done.returncode or int("SKIPPED" in done.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
