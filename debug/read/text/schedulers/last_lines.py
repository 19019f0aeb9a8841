"""The last line of a job, with its exit code or word of a failure, as shells, launchers and runners print it.

Shell scripts (`echo "exit code: $?"`), `kubectl exec`, GNU make, conda run, PyCharm's console, the runners of GitHub Actions and
GitLab, Jenkins; LSF's report; srun, jsrun, Open MPI's and PRRTE's daemons; Slurm's sacct; GNU time, supervisord (`exit status 1;
not expected`), Airflow (`local_task_job_runner.py`), HTCondor's event log, OAR and Flux's eventlog (RFC 21).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from titan_ckpt.debug.read.text.schedulers.process_ends import Ending

_CODE = re.compile(
    r"\s*(?:(?:rc|exit(?:[ _-]?code| status)?)\s*[=:]\s*|exit status |exit code |command terminated with exit code "
    r"|make: \*\*\* .{1,200} Error |Process finished with exit code |##\[error\]Process completed with exit code "
    r"|(?:\S{1,40}: )?(?:python[\d.]{0,5}|command|process|job|training|script|program|child) "
    r"exited with (?:status|(?:exit )?code) "
    r"|ERROR: Job failed: exit code |\+{1,4} exit )(?P<code>-?\d{1,9})\.?(?: \([\w :]{1,60}\))?\s*$",
    re.IGNORECASE,
)
_ENDED = re.compile(
    r"(?:^Exited with exit code |\bTask exited with return code |^Command exited with non-zero status |\(exit status "
    r"|(?<=[\w./-])\.(?:py|sh) exited with (?:(?:exit )?code |status )?)(?P<code>\d{1,3})(?:\.?\s*$|; (?:not )?expected\)$)"
    r"|(?:\(\d\) Abnormal termination \(signal |^Command terminated by signal )(?P<signal>\d{1,2})\)?$"
)
_FAILED = re.compile(
    r"Finished: FAILURE\s*$|ERROR conda\.cli\.main_run:|srun: error: Unable to create step|slurmstepd: error: execve\(\)"
    r"|BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES|YOUR APPLICATION TERMINATED WITH THE EXIT STRING"
    r"|\(first noticed rank \d{1,6}\) terminated with signal|has lost communication with a remote daemon"
    r"|## OAR \[[^\]]{1,40}\] Job \d{1,12} KILLED ##|\[OAR\] walltime reached|\bjob\.exception type=\S{1,40} severity=0\b"
    r"|^009 \([\d.]{1,40}\) .{1,40} Job was aborted"
)
# sacct's row of a job, not of one of its steps: `991  ft-7b  gpu  proj  64  COMPLETED  0:0`; and with --parsable2.
_SACCT = re.compile(
    r"\s*\d{1,12}(?:_\d{1,9})?(?:(?:\s+\S{1,80}){0,12}\s+(?:COMPLETED|FAILED)\s+(?P<code>\d{1,3}):\d{1,3}\s*$"
    r"|(?:\|[^|]{0,80}){0,12}\|(?:COMPLETED|FAILED)\|(?P<cell>\d{1,3}):\d{1,3}(?:\|[^|]{0,80}){0,12}$)"
)
# A scheduler's or a service's word that a job ended well: LSF, SageMaker's toolkit, Ray's `ray job submit`, SkyPilot, Composer,
# `kubectl get job`. All of them know the exit code of what they started, often a shell, which may hide that of a process.
_GOOD = re.compile(
    r"^Successfully completed\.\s*$|\bDone waiting for a return code\. Received 0 from exiting process\."
    r"|-- Job '[\w.-]{1,80}' succeeded\s*$|\bJob \d{1,9} finished \(status: SUCCEEDED\)"
    r"|\b[Aa]ll (?:processes|workers|ranks) exited with (?:code )?0\s*$"
)
_COMPLETE = re.compile(r"^\S{1,120}\s+Complete\s+(?P<done>\d{1,6})/(?P=done)\s")  # of one job among those of a cluster
# The same of a part of the job, or by what may speak of another one: DeepSpeed's launcher, torchrun's events, seff, srun, PBS,
# Grid Engine, HTCondor, systemd, bash and GNU time (`-v`); Azure ML, SageMaker, SkyPilot, MosaicML, torchx, Ray Tune;
# `kubectl get pods`, Argo, Airflow, the runners of GitLab and GitHub; Megatron at its end.
_WELL = re.compile(
    r"\[launch\.py:\d{1,5}:main\] Process \d{1,9} exits successfully\.|torchelastic\.worker\.status\.SUCCEEDED"
    r"|^State: COMPLETED \(exit code 0\)|^srun: \S{1,80}: tasks? [\d,-]{1,80}: Completed\b|^\s+Exit_status = 0\s*$"
    r"|^exit_status +0\s*$|^\s+\(1\) Normal termination \(return value 0\)|\.service: Deactivated successfully\.\s*$"
    r"|^\[\d{1,4}\][+-]? +Done +[^|]{1,400}$|^\tExit status: 0\s*$|^Run exited with code 0\s*$|\bReporting training SUCCESS\b"
    r"|\bJob finished(?: \(status)?: SUCCEEDED\b|^Run status: COMPLETED\b|^Training completed after \d{1,9} iterations at "
    r"|^\S{1,120}-\d{1,6}\s+0/\d{1,3}\s+Completed\s|^Status: +Succeeded\s*$|\bMarking task as SUCCESS\b|^Job succeeded\s*$"
    r"|^\d{1,12}(?:_\d{1,9})?(?:\s+\S{1,80}){1,12}\s+COMPLETED\s+0:0(?:\s+\S{1,200}){1,2}\s*$"
    r"|^Job completed with result: Succeeded\s*$|^\s*\[exiting program at iteration \d{1,9}\]"
)
_OF_WELL = (
    "omplete", "OMPLETE", "ucce", "UCCE", "xit_status", "xit status", "Normal termination", "] ", "]+ ", "]- ",
    "exited with code 0", "exiting program",
)  # fmt: skip
# A rank's own code in words, as scripts collect them: `rank 2: exit code 1`, `rank=2 exitcode=-9`.
_OF_RANK = re.compile(
    r"\s*(?P<who>rank|process|proc)[ _=:#]{0,2}(?P<rank>\d{1,6})[:,]? {0,4}"
    r"(?:(?:has )?(?:exited|ended|finished|terminated|died) )?(?:with )?"
    r"(?:exit[ _-]?(?:code|status)|return[ _-]?code|rc|code|status)[ =:]{1,3}(?P<code>-?\d{1,3})\.?\s*$",
    re.IGNORECASE,
)
UNKNOWN = 1  # the code of a failure whose line has none


def last_code(text: str) -> int | None:
    """The exit code of a job that ends with this line.

    >>> last_code("exit code: 0"), last_code("make: *** [Makefile:12: train] Error 137"), last_code("Finished: FAILURE")
    (0, 137, 1)
    >>> last_code("Command exited with non-zero status 139"), last_code("(0) Abnormal termination (signal 9)")
    (139, -9)
    """
    if match := _CODE.match(text):
        return int(match["code"])
    if match := _ENDED.search(text[:400]):
        return int(match["code"]) if match["code"] else -int(match["signal"])
    if _GOOD.search(text[:400]):
        return 0
    match = _SACCT.match(text)
    if match is not None:
        return int(match["code"] or match["cell"])
    return UNKNOWN if _FAILED.search(text) else None


_ASKS = re.compile(r"(?:^|[$#>%;] ?)echo \"?\$\?\"?\s*$|\b(?:docker|podman) wait [\w.-]{1,100}\s*$")
_NUMBER = re.compile(r"\d{1,3}\s*$")


@dataclass(slots=True)
class LastCode:
    """The exit code that a file tells of a job; also a bare number below the command that asked for it."""

    _is_asked: bool = False

    def take(self, text: str) -> int | None:
        """The exit code of a job that ends with this line.

        >>> last = LastCode()
        >>> last.take("$ echo $?"), last.take("0"), last.take("0")
        (None, 0, None)
        """
        is_asked, self._is_asked = self._is_asked, len(text) < LONGEST_ASKING and _ASKS.search(text) is not None
        return int(text) if is_asked and _NUMBER.match(text) else last_code(text)


LONGEST_ASKING = 300  # characters of a command line


def calls_it_good(text: str) -> bool:
    """Whether a scheduler or a service says that a job ended well, or a launcher that a part of it did.

    >>> calls_it_good("Successfully completed."), calls_it_good("exit code: 0")
    (True, False)
    """
    if _GOOD.search(text[:400]) or _SACCT.match(text) or _COMPLETE.match(text):
        return True
    return any(word in text for word in _OF_WELL) and _WELL.search(text[:400]) is not None


def of_rank(text: str, label: int | None = None) -> Ending | None:
    """The end of a rank (`process 2`: by its number among those that one program spawned) that a line tells in words;
    `label`: the rank by what stood before it.

    >>> found = of_rank("rank=2 exitcode=-9")
    >>> found.rank, found.code, of_rank("rank 2 step 1")
    (2, -9, None)
    """
    if "cod" not in text and "tat" not in text and "rc" not in text:
        return None
    match = _OF_RANK.match(text if label is None else f"rank {label}: {text}")
    if match is None:
        return None
    number, code, is_rank = int(match["rank"]), int(match["code"]), match["who"].lower() == "rank"
    return Ending(code=code, line=0, rank=number) if is_rank else Ending(code=code, line=0, local_rank=number)
