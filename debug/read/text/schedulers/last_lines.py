"""The last line of a job, with its exit code or word of a failure, as shells, launchers and runners print it.

Shell scripts (`echo "exit code: $?"`), `kubectl exec`, GNU make, conda run, PyCharm's console, the runners of GitHub Actions and
GitLab, Jenkins; LSF's report; srun, jsrun, Open MPI's and PRRTE's daemons; Slurm's sacct.
"""

from __future__ import annotations

import re

_CODE = re.compile(
    r"\s*(?:(?:rc|exit(?:[ _-]?code| status)?)\s*[=:]\s*|exit status |command terminated with exit code "
    r"|make: \*\*\* .{1,200} Error |Process finished with exit code |##\[error\]Process completed with exit code "
    r"|ERROR: Job failed: exit code |\+{1,4} exit )(?P<code>-?\d{1,9})\.?(?: \([\w :]{1,60}\))?\s*$",
    re.IGNORECASE,
)
_FAILED = re.compile(
    r"Finished: FAILURE\s*$|ERROR conda\.cli\.main_run:|srun: error: Unable to create step|slurmstepd: error: execve\(\)"
    r"|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES|YOUR APPLICATION TERMINATED WITH THE EXIT STRING"
    r"|\(first noticed rank \d{1,6}\) terminated with signal|has lost communication with a remote daemon"
)
# sacct's row of a job, not of one of its steps: `991  ft-7b  gpu  proj  64  COMPLETED  0:0`; and with --parsable2.
_SACCT = re.compile(
    r"\s*\d{1,12}(?:_\d{1,9})?(?:(?:\s+\S{1,80}){0,12}\s+(?:COMPLETED|FAILED)\s+(?P<code>\d{1,3}):\d{1,3}\s*$"
    r"|(?:\|[^|]{0,80}){0,12}\|(?:COMPLETED|FAILED)\|(?P<cell>\d{1,3}):\d{1,3}(?:\|[^|]{0,80}){0,12}$)"
)
UNKNOWN = 1  # the code of a failure whose line has none


def last_code(text: str) -> int | None:
    """The exit code of a job that ends with this line.

    >>> last_code("exit code: 0"), last_code("make: *** [Makefile:12: train] Error 137"), last_code("Finished: FAILURE")
    (0, 137, 1)
    """
    if match := _CODE.match(text):
        return int(match["code"])
    if text.strip() == "Successfully completed.":  # LSF's report
        return 0
    match = _SACCT.match(text)
    if match is not None:
        return int(match["code"] or match["cell"])
    return UNKNOWN if _FAILED.search(text) else None
