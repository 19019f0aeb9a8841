"""Run the tests of loops whose libraries are not installed, in an environment of their own, `.loops/`.

    python -m tools.loops                 # pytest's options may follow

A test that is skipped there is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tools.environment import environment_with
from tools.paths import ROOT

LIBRARIES = ("torchtitan==0.3.0", "lightning==2.6.6", "triton")  # torch's CPU build omits triton
TESTS = tuple(f"tests/integrations/test_{name}.py" for name in ("torchtitan", "lightning", "stateful_loader"))


def main(arguments: list[str]) -> int:
    """pytest's exit code; 1 if a test was skipped."""
    command = [
        environment_with(LIBRARIES, ROOT / ".loops"),
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
