"""What Slurm's srun, slurmstepd and sacct say of tasks, hosts and jobs; yhrun is the srun of Tianhe's systems.

Sources: Slurm's src/srun/libsrun, src/slurmd/slurmstepd and src/sacct; bash's job messages, whose words srun shares.
"""

from __future__ import annotations

import re

from titan_ckpt.debug.incident.kinds import EventKind

WORDS = {
    "Segmentation fault": -11,
    "Aborted": -6,
    "Bus error": -7,
    "Killed": -9,
    "Floating point exception": -8,
    "Illegal instruction": -4,
    "Terminated": -15,
    "Out Of Memory": -9,
    "Interrupt": -2,
    "User defined signal 1": -10,
    "Trace/breakpoint trap": -5,
    "Hangup": -1,
}
WORD = "|".join(WORDS)

TASKS = re.compile(
    rf"(?:srun|yhrun): error: (?P<host>[\w.\[\],-]{{1,200}}): tasks? (?P<tasks>[\d,\[\]-]{{1,400}}): "
    rf"(?:(?P<word>{WORD})|Exited with exit code (?P<code>\d{{1,3}})|[Ss]ignal (?P<signal>\d{{1,2}}))"
)
NODE_LOST = re.compile(
    r"[Nn]ode failure on (?P<host>[\w.\[\],-]{1,200})"
    r"|[Nn]odes? (?P<other>[\w.\[\],-]{1,200}) (?:not responding|(?:is|are) (?:down|not responding)|set to DOWN)"
)
CANCELLED = re.compile(
    r"\*\*\* (?:JOB|STEP) \S{1,60} ON (?P<host>\S{1,200}) CANCELLED AT \S{1,40}(?P<why> DUE TO [A-Z ]{1,40})?"
)
WHY = {
    "TIME LIMIT": EventKind.TIME_LIMIT, "NODE FAILURE": EventKind.NODE_LOST, "PREEMPTION": EventKind.PREEMPTED,
    "REQUEUE": EventKind.PREEMPTED,
}  # fmt: skip
