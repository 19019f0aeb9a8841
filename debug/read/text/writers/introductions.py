"""Lines by which a rank says who it is: at a program's start, by its host and pid, or by where its recorder listens."""

from __future__ import annotations

import re

# What programs say of themselves at their start; Lightning and DETR's descendants in these words.
_RANK = r"\b(?:[Gg]lobal[ _]?|GLOBAL_)?(?:[Rr]ank|RANK)[ =:]{1,3}(?P<rank>\d{1,6})"
_PID = r"\bpid[ =:]{1,3}"
_INTRODUCED = re.compile(
    rf"(?:{_PID}(?P<before>\d{{2,9}})\b[^\n]{{0,40}}?)?{_RANK}(?:\b[^\n]{{0,40}}?{_PID}(?P<pid>\d{{2,9}})"
    r"|(?: ?/ ?| of )\d{1,6}\b|,? MEMBER: |\)?: env://|,?(?: \|)? (?i:local[ _]rank|world[ _]size)\b| started\b)"
)
# A rank's environment as a shell prints it, accelerate's state, DeepSpeed's settings of MPI (deepspeed/comm/comm.py).
_OF_OWN = re.compile(
    r"(?:^(?:declare -x |export )?RANK=\"?|^Process index: |\bworld_rank=(?=\d{1,6}, local_rank=))(?P<rank>\d{1,6})(?:\"?\s*$|, )"
)
# What a rank says of itself behind its number: `host a3 pid 4711 started`, `host=n1 local_rank=0 pid=12`, `pid 4711 started`.
_ENDED = r"(?:kill|exit|died|dead|terminat|gone)"
_FACTS = r"(?:,? \w{1,30}[ =:]{1,2}\d{1,9}){0,4}"
STARTED = re.compile(
    rf"\b(?:host|node)(?:name)?[ =:]{{1,2}}(?P<host>[\w.-]{{1,80}}){_FACTS},? {_PID}(?P<pid>\d{{2,9}})\b"
    rf"|^{_PID}(?P<own>\d{{2,9}})\b(?!.*{_ENDED})|{_PID}(?P<first>\d{{2,9}}),? started\b"
)
# A rank with its host: `rank=8 world=16 host=c002`, `rank 8 on n2`, `host n2 rank 8`.
_ON_HOST = re.compile(
    r"\b[Rr]ank[ =:]{1,2}(?P<rank>\d{1,6})\b(?:/\d{1,6}| of \d{1,6})?"
    + _FACTS
    + r",? host(?:name)?[ =:]{1,2}(?P<host>[A-Za-z][\w.-]{0,80})"
    r"|\b[Rr]ank (?P<other>\d{1,6}) on (?P<named>[A-Za-z][\w.-]{0,60}\d)\b"
    r"|\bhost(?:name)?[ =:]{1,2}(?P<place>[A-Za-z][\w.-]{0,80}),? [Rr]ank[ =:]{1,2}(?P<there>\d{1,6})\b"
)


def on_host(text: str) -> tuple[int, str] | None:
    """The rank and the host that a line names together.

    >>> on_host("host node1 rank 11 local_rank 3 pid 4713")
    (11, 'node1')
    """
    match = _ON_HOST.search(text[:200])
    if match is None:
        return None
    rank, host = match["rank"] or match["other"] or match["there"], match["host"] or match["named"] or match["place"]
    return int(rank), host


_NUMBERED = re.compile(r"(?:[Rr]ank|RANK)[ =:]{1,3}\"?\d|^Process index: ")


def introduction(text: str) -> tuple[int, str] | None:
    """The rank that a line such as `rank 3/8 pid 4711` is of, and its pid, "" if it is not there.

    >>> introduction("rank 3/8 pid 4711"), introduction('declare -x RANK="1"'), introduction("waiting for rank 1")
    ((3, '4711'), (1, ''), None)
    """
    if not _NUMBERED.search(text[:200]):
        return None
    if match := _INTRODUCED.search(text[:200]):
        return int(match["rank"]), match["before"] or match["pid"] or ""
    match = _OF_OWN.search(text[:200])
    return None if match is None else (int(match["rank"]), "")


# torch/csrc/distributed/c10d/control_plane/WorkerServer.cpp, on the socket that the recorder names after its rank.
_LISTENING = re.compile(r"\] Server listening to UNIX \S{0,4096}/rank_(?P<rank>\d{5})\.sock$")


def listening_rank(text: str) -> int | None:
    """The rank whose recorder says that torch's worker server listens on its socket."""
    match = _LISTENING.search(text) if "Server listening to UNIX" in text else None
    return int(match["rank"]) if match else None


# What a process says that is a job of its own: an array's task (Slurm's environment, `sbatch --array`), or one rank of one.
_APART = re.compile(
    r"\b(?:SLURM_ARRAY_TASK_ID|PBS_ARRAY_INDEX|LSB_JOBINDEX|SGE_TASK_ID)[ =:]{1,2}(?P<task>\d{1,9})\b"
    r"|(?<!parallel )\b(?i:world[ _]?size)\"?[ =:]{1,2}1(?![\d.])|\bSLURM_NTASKS=1\b"
)


def job_apart(text: str, source: str) -> str:
    """Which of several jobs the process is by this line: the task of an array, or `source` where it is alone in its world.

    >>> [job_apart(text, "a.log") for text in ("SLURM_ARRAY_TASK_ID=2", "world size 1", "tensor parallel world size 1")]
    ['2', 'a.log', '']
    """
    has_word = "orld" in text or "ORLD" in text or "TASK" in text or "INDEX" in text
    match = _APART.search(text[:200]) if has_word else None
    return "" if match is None else match["task"] or source
