"""What a line says, its prefixes removed: a kind of event and its values. Each rule is tried only where a literal of it occurs.

Texts from: torch/csrc/distributed/c10d (ProcessGroupNCCL, ProcessGroupGloo, ProcessGroupWrapper, TCPStore, TraceUtils; releases
1.8 to 2.13), gloo/transport/tcp, NCCL (src/misc/socket.cc, src/transport/net_ib), NVIDIA's list of Xid errors, Linux
mm/oom_kill.c, CPython's Modules/faulthandler.c, Open MPI's and UCX's signal handlers; HCCL's EI0002, whose number of the remote
rank counts in its group (a group of the program's own is named "group_name_N"); accelerate/utils/operations.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.read.text.crashes import GLIBC_WORDS, SIGNAL_WORDS, Values, dumped, fatal, foreign, glibc, glog
from titan_ckpt.debug.read.text.error_kinds import MISMATCH, OOM_WORDS, has_any, is_mere_talk, kind_of_error

# --------------------------------------------------------------------------------------------------------- values

_GROUP = re.compile(
    r"\[PG (?:ID (?P<id>\S{1,40}) )?(?:PG )?(?:GUID )?(?P<group>[^\]\n]{0,120}?) Rank (?P<rank>\d{1,6})\]"
)
_WORK = re.compile(r"Work\w{0,12}\((?P<fields>[^()]{0,200}(?:\([^()]{0,20}\)[^()]{0,200}){0,3})(?:\)|\(?\w{0,9}$)")
_FIELD = re.compile(r"(?P<key>\w+(?:\(ms\))?) ?= ?(?P<value>\[[^\]]{0,120}\]|[^,\s)]{1,60})")
_ELAPSED = re.compile(r"ran for (\d{1,18}) milliseconds")
_PLAIN_RANK = re.compile(r"\[[Rr]ank (\d{1,6})\]")
_FIELD_NAMES = {
    "SeqNum": "seq", "OpType": "op", "NumelIn": "numel_in", "NumelOut": "numel_out", "Timeout(ms)": "timeout",
    "TensorShape": "shape",
}  # fmt: skip
_LAST_WORK = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), ?last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
_AT_WORK = re.compile(
    r"(?:at (?:NCCL )?work:?|work sequence id:|at work sequence id:) (?P<seq>\d{1,18})|work \(seq: (?P<other>\d{1,18})\)"
)


def _watchdog(text: str) -> Values | None:
    """ProcessGroupNCCL's watchdog: `WorkNCCL(SeqNum=77, OpType=ALLREDUCE, NumelIn=4, Timeout(ms)=6000) ran for ...`."""
    values = _group(text)
    if work := _WORK.search(text):
        for field in _FIELD.finditer(work["fields"]):
            if name := _FIELD_NAMES.get(field["key"]):
                values[name] = field["value"]
    if elapsed := _ELAPSED.search(text):
        values["elapsed"] = elapsed.group(1)
    if last := _LAST_WORK.search(text):
        values.update(last.groupdict())
        if "seq" not in values and (at := _AT_WORK.search(text)):
            values["seq"] = at["seq"] or at["other"]
    return values if {"op", "enqueued"} & set(values) else None


def _progress(text: str) -> Values:
    """How far a rank is in its group, in a line that another rank's timeout made it write."""
    last = _LAST_WORK.search(text)
    return {**_group(text), **last.groupdict()} if last else {}


def _group(text: str) -> Values:
    """Group and the writer's rank in it; `[Rank 3]` alone (torch 1.x) is a rank of an unnamed group."""
    if match := _GROUP.search(text):
        return {"group": match["group"], "rank": match["rank"]}
    match = _PLAIN_RANK.search(text)
    return {"rank": match.group(1)} if match else {}


_STORE_KEY = re.compile(
    r"(?:wait timeout after \d{1,12} ?ms, keys:|[Tt]imeout waiting for key:?|waiting for key) '?(?P<key>[^\s,']{1,200})"
)
_KEY_RANK = re.compile(r"(?:^|(?<!cuda/)/)(?:rank_)?(\d{1,6})$")  # not the number of a communicator, `//cuda//0`
_UNIQUE_ID = re.compile(r"retrieving ncclUniqueId from \[(\d{1,6})\]")
_STORE_LOST = re.compile(
    r"Connection (?:reset|closed|refused|was likely closed)|[Bb]roken pipe|recvValue failed|Failed to recv"
)
_CLIENTS = re.compile(r"waiting for clients\. (?P<joined>\d{1,7})/(?P<expected>\d{1,7}) clients joined")


# torch/distributed/distributed_c10d.py, `_store_based_barrier`; the second name of the count since 2.1.
_STORE_BARRIER = re.compile(
    r"in store based barrier .{0,60}?rank:? \d{1,6},(?: for)? key: \S{1,200} \(world_size=(?P<expected>\d{1,7}), "
    r"(?:worker_count|num_workers_joined)=(?P<joined>\d{1,7})"
)


def _store_wait(text: str) -> Values | None:
    if match := _CLIENTS.search(text) or _STORE_BARRIER.search(text):
        return {"joined": match["joined"], "expected": match["expected"]}
    if (match := _UNIQUE_ID.search(text)) and not _STORE_LOST.search(text):
        return {"key": "ncclUniqueId", "rank": match.group(1)}
    if match := _STORE_KEY.search(text):
        awaited = _KEY_RANK.search(match["key"])
        return {"key": match["key"], **({"rank": awaited.group(1)} if awaited else {})}
    return None


_LIST = r"(?P<names>\d{1,6}(?:, ?\d{1,6}){0,4000})"
_BARRIER = re.compile(rf"Ranks? {_LIST} failed to pass monitoredBarrier")
_FINGERPRINTS = re.compile(
    r"Rank (?P<own>\d{1,6}) is running (?:collective: )?(?P<what>.{0,600}?),? ?but Rank (?P<names>\d{1,6}) is running "
    r"(?:collective: )?(?P<other>.{0,600})"
)
_OP_TYPE = re.compile(r"OpType=(\w+)")
_SHAPE = re.compile(r"TensorShape=(\[[\d, ]{0,80}\])")
_DTYPES = re.compile(r"TensorDtypes=(\w+)")
_DESYNC = re.compile(
    rf"\[{_LIST}\] (?:joined but didn't finish collective #(?P<seq>\d{{1,12}})"
    r"|finished collective #\d{1,12}, but didn't join collective #(?P<missed>\d{1,12}))"
)
_NEVER_JOINED = re.compile(rf"ranks \[{_LIST}\] are the lagging ranks")


def _desync(text: str) -> Values | None:
    found = _named(_DESYNC)(text)
    never = _named(_NEVER_JOINED)(text) if found is None else None
    return {**never, "missed": "1"} if never else found


def _named(pattern: re.Pattern[str]) -> Callable[[str], Values | None]:
    def values(text: str) -> Values | None:
        match = pattern.search(text)
        if match is None:
            return None
        return {key: value.replace(" ", "") for key, value in match.groupdict().items() if value}

    return values


_PARAMETERS = re.compile(
    r"Rank (?P<own>\d{1,6}) has (?P<mine>\d{1,9}) params, while rank (?P<names>\d{1,6}) has inconsistent (?P<theirs>\d{1,9})"
)
_PARAMETER = re.compile(
    r"\[(?P<own>\d{1,6})\]: params\[(?P<number>\d{1,9})\] in this process with sizes (?P<sizes>\[[\d, ]{0,80}\])"
)


def _mismatch(text: str) -> Values:
    """ProcessGroupWrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL): the writer's collective and another rank's. DDP's constructor
    (torch/csrc/distributed/c10d/reducer.cpp): the writer's parameters and another rank's."""
    if match := _PARAMETERS.search(text):
        calls = {"call_of_own": f"DDP|{match['mine']} parameters", "call_of_named": f"DDP|{match['theirs']} parameters"}
        return {"own": match["own"], "names": match["names"], **calls}
    if match := _PARAMETER.search(text):
        calls = {
            "call_of_own": f"DDP|parameter {match['number']} of sizes {match['sizes']}",
            "call_of_named": "DDP|other sizes",
        }
        return {"own": match["own"], "names": "0", "others": "as named", **calls}
    match = _FINGERPRINTS.search(text)
    if match is None:
        return {}
    calls = {"call_of_own": _call(match["what"]), "call_of_named": _call(match["other"])}
    return {"own": match["own"], "names": match["names"], **{name: call for name, call in calls.items() if call}}


def _call(text: str) -> str:
    """`ALLREDUCE|[20, 10]|Float` of a fingerprint; releases before 1.13 give of the other rank the operation alone."""
    found = [pattern.search(text) for pattern in (_OP_TYPE, _SHAPE, _DTYPES)]
    if found[0] is None:
        bare = re.match(r"\s{0,4}([A-Z_]{3,40})\b", text)
        return bare.group(1) if bare else ""
    return "|".join(part.group(1) if part else "" for part in found).rstrip("|")


_PROCESS_SHAPE = re.compile(r"\s*- Process (?P<rank>\d{1,6}): (?P<shape>\[[\d, \[\]]{0,200}\])\s*$")


def _process_shape(text: str) -> Values | None:
    """A line of the list in Accelerate's DistributedOperationException (debug mode): the shape that one process passed."""
    match = _PROCESS_SHAPE.match(text)
    if match is None:
        return None
    return {"own": match["rank"], "names": match["rank"], "call_of_own": f"a collective|{match['shape']}"}


_NOTIFY = re.compile(r"from remote rank: ?\[(?P<names>\d{1,6})\](?!.{0,400}group_name_)")


_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[\w:.]{1,20})\): (?P<xid>\d{1,4})(?:, pid='?(?P<pid>\d{1,9}))?")
_OOM_KILLED = re.compile(
    r"(?:Kill(?:ed)?|reaped) process (?P<pid>\d{1,9})(?: \((?P<program>[^()]{1,40})\))?|oom-kill:.{0,300}?\bpid=(?P<task>\d{1,9})"
)
_WORKER = re.compile(r"DataLoader worker \(pids?\(?s?\)? ?(?P<worker>[\d, ]{1,60})\)")
_SXID = re.compile(r"SXid \([^)]{1,40}\): \d{1,6}, Fatal\b")


def _device(text: str) -> Values:
    match = _XID.search(text)
    return {key: value for key, value in match.groupdict().items() if value} if match else {}


def _is_fatal_switch(text: str) -> Values | None:
    """An NVSwitch error that is no mere note: `SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 29 LTSSM Fault Up`."""
    return {} if _SXID.search(text) else None


def _kernel_oom(text: str) -> Values:
    match = _OOM_KILLED.search(text)
    pid = match["pid"] or match["task"] if match else ""
    return {"pid": pid, "cause": "oom", **foreign(match["program"])} if match else {}


# ---------------------------------------------------------------------------------------------------------- rules


# nvidia-resiliency-ext, fault_tolerance/rank_monitor_server.py: a rank's monitor. A rank that waits sends no heartbeat either.
_NVRX_WORDS = (
    "Did not get subsequent heartbeat",
    "Did not get initial heartbeat",
    "' has been open for ",
    "Did not get any section",
)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Of the texts that hold one of `words`, those that `values` accepts (None: no) are of `kind`."""

    kind: EventKind
    words: tuple[str, ...]
    values: Callable[[str], Mapping[str, str] | None] = lambda _text: {}


_RULES = (
    _Rule(
        EventKind.WATCHDOG, ("atchdog caught collective", "last enqueued", "collective operation timeout"), _watchdog
    ),
    _Rule(
        EventKind.DESYNC, ("but didn't join collective", "joined but didn't finish", "are the lagging ranks"), _desync
    ),
    _Rule(EventKind.COMM_TIMEOUT, ("failed to pass monitoredBarrier",), _named(_BARRIER)),
    _Rule(EventKind.COMM_TIMEOUT, ("Notify register times out",), lambda text: _named(_NOTIFY)(text) or {}),
    _Rule(EventKind.COMM_MISMATCH, MISMATCH, _mismatch),
    _Rule(EventKind.COMM_MISMATCH, ("- Process ",), _process_shape),
    _Rule(
        EventKind.STORE_WAIT,
        (
            "wait timeout after",
            "clients joined",
            "aiting for key",
            "retrieving ncclUniqueId",
            "in store based barrier",
        ),
        _store_wait,
    ),
    _Rule(
        EventKind.HEARTBEAT,
        ("eartbeat monitor timed out", "watchdog got stuck for", "dump signal", *_NVRX_WORDS),
        _progress,
    ),
    _Rule(
        EventKind.DEVICE_ERROR,
        (
            "NVRM: Xid",
            "fallen off the bus",
            "GPU is lost",
            "ncorrectable ECC",
            "PCIe Bus Error: severity=Uncorrect",
            "hermal shutdown",
            "Memory access fault by GPU",
            "Unable to determine the device handle",
        ),
        _device,
    ),
    _Rule(EventKind.DEVICE_ERROR, ("SXid (",), _is_fatal_switch),
    _Rule(EventKind.KILLED, ("Killed process", "reaped process", "oom-kill:"), _kernel_oom),
    _Rule(EventKind.FATAL_SIGNAL, ("Fatal Python error", *(f"{word}" for word in SIGNAL_WORDS)), fatal),
    _Rule(EventKind.FATAL_SIGNAL, GLIBC_WORDS, glibc),
    _Rule(EventKind.FATAL_SIGNAL, ("received by PID ",), glog),
    _Rule(EventKind.KILLED, ("dumped core", "terminated abnormally without generating a coredump"), dumped),
    _Rule(EventKind.EXCEPTION, ("received signal CUDA_EXCEPTION_",)),
)


def _is(kind: EventKind) -> Callable[[str], Values | None]:
    return lambda text: {} if kind_of_error(text) == kind else None


def _signal(text: str) -> Values | None:
    return None if "signals_to_handle" in text else {}  # a setting of torchrun's


_ABORTED = (
    "terminated with exception: CUDA error",
    "what():  CUDA error",
    "what():  HIP error",
    "NCCL WARN Cuda failure",
)
# vLLM's v1/executor/multiproc_executor.py, v1/engine/core.py and core_client.py; SGLang's srt/entrypoints/engine.py.
_SERVERS = (
    "died unexpectedly", "Got fatal signal from worker processes", "EngineCore hit an exception",
    "EngineCore encountered a fatal error", "Received sigquit from a child process",
)  # fmt: skip
# aws-ofi-nccl, NCCL's src/init.cc and src/bootstrap.cc, torch's rpc/tensorpipe_agent.cpp, horovod/common/stall_inspector.cc.
_WARNINGS = (
    "NCCL WARN NET/OFI Request", "NCCL WARN NET/OFI RC", "NCCL WARN Duplicate GPU detected", "NCCL WARN Bootstrap Root",
    "NCCL WARN Mismatched collective", "RPC agent for ", "waiting for remainder of ranks for more than", "ncclInvalidUsage: ",
)  # fmt: skip
# JAX's coordination service (xla/tsl/distributed_runtime/coordination): tasks that sent no heartbeat any more, one a line.
_OF_JAX = ("stopped sending heartbeats", "distributed service detected fatal errors")
_TASK_OF_JAX = re.compile(r"/job:\w{1,40}/replica:\d{1,6}/task:\d{1,6}\b")
# The last line of a traceback, where people paste that alone, and the watchdog's of an error that is no timeout of its own.
_BARE = (
    "watchdog thread terminated with exception: NCCL",
    "connectFullMesh failed",
    "DistBackendError: ",
    "DistNetworkError: ",
    "DistStoreError: ", "/gloo/transport/",
)  # fmt: skip
_LAST_RULES = (
    _Rule(EventKind.OOM, OOM_WORDS, lambda text: None if is_mere_talk(text) else {}),
    _Rule(EventKind.EXCEPTION, _ABORTED[:3], _is(EventKind.EXCEPTION)),
    _Rule(EventKind.DEVICE_ERROR, _ABORTED, _is(EventKind.DEVICE_ERROR)),
    _Rule(EventKind.DEVICE_ERROR, (*_ABORTED[:3], "HSA_STATUS_ERROR")),
    _Rule(
        EventKind.COMM_CLOSED,
        ("Connection closed by remote peer", "NCCL WARN Call to recv", "NCCL WARN Net : Call to recv"),
    ),
    _Rule(EventKind.COMM_ERROR, ("NCCL WARN NET/IB", "NCCL WARN Cuda failure", "NCCL WARN [Proxy Service", *_WARNINGS)),
    *(_Rule(kind, _BARE, _is(kind)) for kind in (EventKind.COMM_CLOSED, EventKind.COMM_TIMEOUT, EventKind.COMM_ERROR)),
    _Rule(EventKind.EXITED, (*_SERVERS, *_OF_JAX)),
    _Rule(EventKind.EXITED, ("/replica:",), lambda text: {} if _TASK_OF_JAX.match(text) else None),
    _Rule(EventKind.SIGTERM, ("SIGTERM", "signal 15", "Signal 15", "SIGUSR1"), _signal),
)
NO_DIGITS = str.maketrans("", "", "0123456789")
_TRIGGERS = tuple(sorted({word.rstrip("0123456789") for rule in (*_RULES, *_LAST_RULES) for word in rule.words}))
# Literals that a middle part of a huge log is searched for; `Error` covers most of the words above.
LANDMARKS = tuple(
    word.encode()
    for word in (
        "Traceback (most recent",
        "Error",
        "rror:",
        "FAILED",
        "exitcode",
        "atchdog",
        "NCCL WARN",
        "NVRM",
        "illed",
        "OOM",
        "ut of memory",
        "ut Of Memory",
        "SIGTERM",
        "ignal",
        "fault",
        "clients joined",
        "collective",
        "DUE TO",
        "restart",
        "Node failure",
        "Bus error",
        "return code = ",
        "MPI_A",
        "TERM_",
        "PBS: job",
        "Evicted",
        "NotReady",
        "worker died",
        "died unexpectedly",
        "heartbeat",
    )
)


def without(words: tuple[str, ...]) -> Callable[[str], bool]:
    """A test whether a line without its digits holds none of `words`: most lines of a log differ in numbers only."""

    @lru_cache(maxsize=4096)
    def is_plain(text: str) -> bool:
        return not has_any(text, words)

    return is_plain


_is_plain = without(_TRIGGERS)


def recognize(text: str) -> tuple[EventKind, Values] | None:
    """What a line says that is not the last line of a traceback; None if nothing is known of it."""
    if _is_plain(text.translate(NO_DIGITS)):
        return None
    for rules in (_RULES, _LAST_RULES):
        for rule in rules:
            if has_any(text, rule.words):
                values = rule.values(text)
                if values is not None:
                    return rule.kind, dict(values)
    return None


def details(kind: EventKind, text: str) -> Values:
    """Values of an error message (a traceback's last line), by the same rules: who is named, what was waited for."""
    for rule in _RULES:
        if rule.kind == kind and has_any(text, rule.words):
            return dict(rule.values(text) or {})
    worker = _WORKER.search(text)
    return {"worker": worker["worker"]} if worker else {}
