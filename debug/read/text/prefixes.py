"""Peel what launchers, schedulers and loggers put before a line: any number of prefixes in any order, in one mechanism.

Sources of the forms: torchrun's `--tee` and `--log-line-prefix-template` (torch/distributed/elastic/multiprocessing/api.py),
torch's own `[rank3]:` (c10/util/Logging.cpp, torch/distributed/distributed_c10d.py `_exception_hook`), `srun --label`, Open MPI's
`--tag-output` and `--timestamp-output`, SageMaker's `[1,mpirank:3,algo-1]<stdout>:`, Hydra's `-prepend-rank`,
`kubectl logs --prefix`, stern, docker compose, pdsh, Ray's `(name pid=1, ip=...)`, SkyPilot's `(head, rank=0, pid=1)`,
`gcloud ai custom-jobs stream-logs`, NVRx's rank monitor, SGLang's `[TIME TP3]`, NCCL's `host:pid:tid [device] NCCL INFO`,
CRI's log format, syslog and the kernel's ring buffer; Determined's `<info> [TIME] CONTAINER [rank=3] || `
(harness/determined/common/api/logs.py), `logcli query`'s `TIME {pod="fit-3"} `, the fields of `logging`,
`TIME - NAME - LEVEL - FILE:LINE - `, before a rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from titan_ckpt.debug.read.text import clocks

MAX_LAYERS = 16
REPLICA, POD = 1, 2  # names that compose made up, whose numbers count from 1, and those of a cluster's pods
LOOK = 400  # characters in which a prefix must end


@dataclass(slots=True)
class Line:
    """One line without its prefixes, and what those said. `shown` still has the time.

    `rank` is global; `local_rank` counts on its host; `node` counts hosts; `task` counts what srun or mpiexec started, which
    may be ranks or launchers of several.
    """

    text: str
    shown: str = ""
    rank: int | None = None
    local_rank: int | None = None
    node: int | None = None
    task: int | None = None
    host: str = ""
    host_kind: int = 0  # of the host's name: a machine's, or REPLICA, or POD
    pid: int | None = None
    time_s: float | None = None
    zone: str = ""  # of that time, as `clocks.zone_of` gives it
    is_nccl: bool = False  # NCCL wrote it: `pid` is the rank's own process
    level: str = ""  # of a log record, where it stood before other prefixes

    @property
    def place(self) -> str:
        """In which local ranks count: a host, or a task such as `task 1`; "" where no prefix tells."""
        return self.host or ("" if self.task is None else f"task {self.task}")


_Take = Callable[[Line, re.Match[str]], None]


def _rank(line: Line, match: re.Match[str]) -> None:
    if line.rank is None or match[0].startswith("[rank"):  # torch's own is global; `[Rank 0]` may count in a group
        line.rank = int(match["rank"])


def _task(line: Line, match: re.Match[str]) -> None:
    line.task = int(match["rank"])


def _role(line: Line, match: re.Match[str]) -> None:
    if match["role"].lower() == "rank":
        line.rank = int(match["n"])
    else:
        line.local_rank = int(match["n"])


def _fields(line: Line, match: re.Match[str]) -> None:
    """Ray's and SkyPilot's `(name, rank=0, pid=123, ip=10.0.0.1)`."""
    body = match["fields"]
    values = {key: value.strip() for key, value in re.findall(r"(\w+)=([^,\s)]+)", body)}
    name = body.partition(",")[0].strip()
    is_node = re.fullmatch(r"head|worker-?\d+|node-?\d+", name) is not None
    rank = values.get("world_rank") or values.get("global_rank") or values.get("rank", "")
    if rank.isdigit():
        if is_node:  # SkyPilot counts nodes
            line.node = int(rank[:6])
        else:
            line.rank = int(rank[:6])
    if values.get("local_rank", "").isdigit():
        line.local_rank = int(values["local_rank"][:6])
    line.host = values.get("ip") or (name if is_node else line.host)
    if values.get("pid", "").isdigit():
        line.pid = int(values["pid"][:12])


def _rank_on_host(line: Line, match: re.Match[str]) -> None:
    line.rank, line.host = int(match["rank"]), match["host"] or line.host


def _host(line: Line, match: re.Match[str]) -> None:
    line.host = match["host"]


def _replica(line: Line, match: re.Match[str]) -> None:
    line.host, line.host_kind = match["host"], REPLICA


def _pod(line: Line, match: re.Match[str]) -> None:
    line.host, line.host_kind = match["host"], POD


def _labels(line: Line, match: re.Match[str]) -> None:
    """Of Loki's labels the pod, else the machine."""
    values = dict(re.findall(r'(\w+)="([^"]*)"', match["labels"]))
    pod = values.get("pod", values.get("pod_name", ""))
    host = next((values[key] for key in ("host", "hostname", "node_name", "instance") if values.get(key)), "")
    line.host, line.host_kind = (pod, POD) if pod else (host, 0)


def _nccl(line: Line, match: re.Match[str]) -> None:
    line.host, line.pid, line.is_nccl = match["host"], int(match["pid"]), True


def _local(line: Line, match: re.Match[str]) -> None:
    line.local_rank = int(match["rank"])


def _fields_of_record(line: Line, match: re.Match[str]) -> None:
    line.level = next((field for field in match[0].split(" - ") if field.strip("- ") in _LEVELS), "").strip("- ")


def _node(line: Line, match: re.Match[str]) -> None:
    line.node = int(match["n"])


def _process(line: Line, match: re.Match[str]) -> None:
    line.host, line.pid = match["host"], int(match["pid"])


def _level(line: Line, match: re.Match[str]) -> None:
    line.level = match["level"]


def _nothing(_line: Line, _match: re.Match[str]) -> None:
    return


_N = r"0*(?P<rank>\d{1,6})"
_NAME = r"[A-Za-z0-9](?:[\w.-]{0,80}[A-Za-z0-9])?"
# By the first character. Every pattern is anchored and bounded, so a line costs time linear in its length.
# Where a rule has a literal, it is tried only on heads that hold it.
_BRACKET: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    ("]", re.compile(rf"\[[Rr][Aa][Nn][Kk][ _:=-]?{_N}(?:/\d{{1,6}})?\]:? ?"), _rank),
    (">:", re.compile(rf"\[(?:[^\[\],]{{0,60}}@)?\d{{1,9}},{_N}\]<std\w{{3,4}}>: ?"), _task),
    (
        ",mpirank:",
        re.compile(rf"\[\d{{1,9}},mpirank:{_N}(?:,(?P<host>[\w.-]{{1,80}}))?\](?:<std\w{{3,4}}>)?: ?"),
        _rank_on_host,
    ),
    ("]:", re.compile(r"\[(?P<role>[A-Za-z_][\w.-]{0,40}?)0*(?P<n>\d{1,6})\]: ?"), _role),
    ("]:", re.compile(rf"\[[^\[\]]{{0,60}}\b(?:global_?)?[Rr]ank[ _:=-]?{_N}\b[^\[\]]{{0,60}}\]: ?"), _rank),
    ("[RankMonitorServer:", re.compile(r"\[\w{4,8}\] (?=\[RankMonitorServer:)"), _nothing),
    ("[RankMonitorServer:", re.compile(rf"\[RankMonitorServer:{_N}\] "), _rank),
    ("[pod/", re.compile(r"\[pod/(?P<host>[\w.-]{1,120})/[\w.-]{1,120}\] "), _pod),
    ("] [", re.compile(r"\[\d{1,9}\] (?=\[)"), _nothing),
    ("][", re.compile(r"\[(?:node|host|machine)[ _:=-]?(?P<n>\d{1,6})\](?=\[)", re.IGNORECASE), _node),
    ("][", re.compile(rf"\[(?:local(?:[ _]rank)?|gpu|cuda)[ _:=-]?{_N}\](?=\[)", re.IGNORECASE), _local),
)
_PAREN: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    (" pid=", re.compile(rf"\((?:EngineCore_\w{{1,20}} |APIServer )?(?:Vllm)?Worker_TP{_N} pid=\d{{1,9}}\) ?"), _rank),
    ("=", re.compile(r"\((?P<fields>[^()]{0,200}\b(?:pid|ip|rank)=[^()]{0,200})\) ?"), _fields),
)
_PIPE: tuple[tuple[str, re.Pattern[str], _Take], ...] = (  # fields of loguru and logging, between bars
    ("||", re.compile(r"\|\| "), _nothing),
    (
        "rank",
        re.compile(rf"\| {{0,4}}(?:[A-Z]{{4,8}} {{0,4}}\| {{0,4}})?(?:global_)?rank ?[=:] ?{_N} {{0,4}}\| ?"),
        _rank,
    ),
)
_ANGLE: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    ("> ", re.compile(r"<(?:trace|debug|info|warning|error|critical)> {1,8}(?=\[\d{4}-)"), _nothing),
)
_BRACE: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    ('="', re.compile(r'\{(?P<labels>(?:\w{1,60}="[^"]{0,200}",? ?){1,20})\}\s{1,4}'), _labels),
)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_DASH: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    ("ank", re.compile(r"(?:- [\w.:/]{1,80} ){1,4}- (?=[\[(<]?[Rr]ank)"), _fields_of_record),
)
_WORD: tuple[tuple[str, re.Pattern[str], _Take], ...] = (
    ("std", re.compile(r"(?:stdout|stderr) [FP] "), _nothing),
    ("[", re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,4}(?=\[[Rr][Aa][Nn][Kk][ _:=-]?\d)"), _level),
    (" [rank=", re.compile(r"[0-9a-f]{8} (?:\|\| )?(?=\[rank=)"), _nothing),
    (
        ".py:",
        re.compile(r"(?:ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[(?:[\w/]{1,60}/)?multiproc_executor\.py:\d{1,5}\] "),
        _nothing,
    ),
    ("TP", re.compile(rf"TP{_N}(?: EP\d{{1,6}})?\] "), _rank),
    ("", re.compile(rf"(?:[Rr]ank|RANK)[ _=-]?{_N}(?::| \|) ?"), _rank),
    (
        "NCCL",
        re.compile(rf"(?P<host>{_NAME}):(?P<pid>\d{{1,9}}):\d{{1,9}}(?::\d{{1,9}})? (?=\[\d+\] NCCL|\[\d+\] |NCCL )"),
        _nccl,
    ),
    (" kernel: ", re.compile(rf"(?P<host>{_NAME}) kernel: "), _host),
    (
        "]: ",
        re.compile(rf"(?P<host>{_NAME}) (?:slurmstepd|slurmd|kubelet|containerd|systemd)\[\d{{1,9}}\]: "),
        _host,
    ),
    ("]: ", re.compile(rf"(?P<host>{_NAME}) python[\d.]{{0,6}}\[(?P<pid>\d{{1,9}})\]: "), _process),
    ("| ", re.compile(rf"(?P<host>(?!\d{{1,6}}\s){_NAME})\s{{1,40}}\| "), _replica),
    (
        "\tworkerpool",
        re.compile(r"[A-Z]{4,8}\t\d{4}-\d\d-\d\d [\d:.]{8,15}[ +\-\d]{0,7}\t(?P<host>workerpool\d-\d{1,5})\t{1,2}"),
        _host,
    ),
    (
        "\tservice\t",  # Vertex AI's own
        re.compile(r"[A-Z]{4,8}\t\d{4}-\d\d-\d\d [\d:.]{8,15}[ +\-\d]{0,7}\tservice\t{1,2} ?"),
        lambda _line, _match: None,
    ),
)
_BY_SIGN = {"[": _BRACKET, "(": _PAREN, "|": _PIPE, "<": _ANGLE, "-": _DASH, "{": _BRACE}
_PAIR = r'\w{1,20}=(?:"[^"]{0,60}"|[^\s"]{1,60})'
# Ambiguous alone ("3: apples"): they count where most lines of a file have them.
WEAK: dict[str, tuple[re.Pattern[str], _Take]] = {
    "inner": (re.compile(rf"\[?{_N}(?:\]:?|:| [|-]) "), _rank),  # what a program writes behind a label of its launcher
    "srun": (re.compile(rf"\s{{0,6}}{_N}: ?"), _task),
    "hydra": (re.compile(rf"\[{_N}\]:? "), _task),
    "parenthesis": (re.compile(rf"\({_N}\) "), _rank),
    "angle": (re.compile(rf"<[Rr]ank[=: ]?{_N}> ?"), _rank),
    "index": (re.compile(rf"[Rr]ank\[{_N}\]:? "), _rank),
    "short": (re.compile(rf"\[?(?:[\w.-]{{1,60}}[:/])?r{_N}[\]>|]? "), _rank),
    "logfmt": (re.compile(rf"(?=.{{0,200}}\b(?:level|lvl|severity)=)(?:{_PAIR} ){{0,6}}(?:global_)?rank={_N} "), _rank),
    "gpu": (re.compile(rf"\[(?:gpu|GPU|cuda)[ :_]?{_N}\] "), _local),
    "pdsh": (re.compile(rf"(?P<host>{_NAME}): "), _host),
    "stern": (re.compile(rf"(?P<host>{_NAME}-{_NAME}) (?!exited )[a-z0-9-]{{2,60}} "), _pod),
}
_TORCH_TERMINAL = "ProcessGroup"


def peel(line: str, weak: Sequence[str] = (), year: int = 1970) -> Line:
    """The line without its prefixes. `weak` names the ambiguous forms that this file uses (`usual_prefixes`).

    >>> peel("[default3]:[rank7]: hello").text, peel("[default3]:[rank7]: hello").rank
    ('hello', 7)
    """
    found = Line(text=line)
    at = 0
    time = ""
    for _ in range(MAX_LAYERS):
        end, is_time = _layer(line[at : at + LOOK], found, weak, year)
        if not end:
            break
        time = line[at : at + end] if is_time else time
        at += end
    found.text = f"{found.level} {line[at:]}" if found.level else line[at:]
    found.shown = time + found.text
    return found


def _layer(head: str, found: Line, weak: Sequence[str], year: int) -> tuple[int, bool]:
    """How much of `head` its first prefix takes, and whether that is a time."""
    first = head[:1]
    if first.isalnum():
        rules = _WORD
    elif first in _BY_SIGN:
        rules = _BY_SIGN[first]
    elif first == " " and weak:
        rules = ()
    else:
        return 0, False
    if first.isdigit() and (end := _time(head, found, year)):
        return end, True
    for literal, pattern, take in rules:
        if literal in head and (match := pattern.match(head)):
            take(found, match)
            return match.end(), False
    if not first.isdigit() and (end := _time(head, found, year)):
        return end, True
    for name in weak:
        pattern, take = WEAK[name]
        if name == "inner" and not outer_of(found):
            continue
        if (match := pattern.match(head)) and not is_word(name, match):
            take(found, match)
            return match.end(), False
    return 0, False


def outer_of(line: Line) -> tuple[str, int | None] | None:
    """The process that a launcher's label names: by its place on a host, or by a host."""
    return (line.host, line.local_rank) if line.local_rank is not None or line.host else None


def _time(head: str, found: Line, year: int) -> int:
    if match := clocks.GLOG.match(head):  # stays: `[E1122 02:07:08 ProcessGroupNCCL.cpp:685]` is a part of the message
        found.time_s = clocks.seconds(match, year) or found.time_s
        return 0
    if head[0] == "[" and (match := clocks.KERNEL.match(head)):
        return match.end()
    if head[0].isalpha() and head[:3] not in clocks.WORDS:
        return 0
    for pattern in clocks.LEADING:
        if match := pattern.match(head):
            found.time_s = clocks.seconds(match, year) or found.time_s
            found.zone = clocks.zone_of(match) or found.zone
            return match.end()
    return 0


_WORDS = re.compile(
    r"(?i:info|warning|warn|error|critical|debug|fatal|file|note|traceback|step|epoch|loss|srun|slurmstepd|slurmd|mpirun|"
    r"kernel|nvrm|killed|process|python|bash|sh|terminate|exception|frame|gpu|cuda|nccl|thread|rank|host|time|total|raise)\d?|"
    r".*(?:Error|Exception|Warning|Exit|Interrupt)"
)


def is_word(name: str, match: re.Match[str]) -> bool:
    """Whether what looks like a host's name is a word of the text."""
    return name in ("pdsh", "stern") and _WORDS.fullmatch(match["host"]) is not None
