"""What an error message means: an error of the program's own, of its GPU, or the symptom of a peer's trouble.

Texts from torch/csrc/distributed/c10d (ProcessGroupNCCL, ProcessGroupGloo, ProcessGroupWrapper, TCPStore; 1.8 to 2.13),
gloo/transport/tcp, NCCL (src/init.cc, src/misc/socket.cc), CUDA's list of runtime errors (cudaError_t) and HIP's; Huawei's CANN
(error code EI0002 and the runtime's codes of timeouts) and torch_npu; accelerate/utils/operations.py.
"""

from __future__ import annotations

import re

from titan_ckpt.debug.incident.kinds import EventKind

OOM_WORDS = (
    "OutOfMemoryError",
    "out of memory",
    "oom-kill",
    "oom_kill",
    "OOM Killed",
    "Out Of Memory",
    "Out of memory",
    "MemoryError",
    "std::bad_alloc",
    "can't allocate memory",
    "Cannot allocate memory",
    "insufficient shared memory",
    "unable to mmap",
    "OUT_OF_MEMORY",
    "Error while creating shared memory segment",
    "failed to extend /dev/shm",
)
_CLOSED_WORDS = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited", "remote process exiting",
    "ncclRemoteError", "remote worker crash", "Connection refused", "recvValue failed", "Failed to recv", "failed to recv",
    "Connection closed by remote peer", "closed by remote", "No route to host", "peer closed",
)  # fmt: skip
_TIMEOUT = re.compile(
    r"Timed out waiting|wait timeout after|Watchdog caught|timed out after \d+ ?(?:ms|seconds)|Socket Timeout"
    r"|timeout.{0,80}collective"
    r"|failed to pass monitoredBarrier|Timed out after \d+ seconds|Application timeout caused pair closure|RendezvousTimeoutError"
    r"|socket has timed out|[Tt]imeout waiting for key|Notify register times out|error code(?: is)?:? ?50704[678]\b"
)
# A program's own waits: torch/utils/data/dataloader.py for its workers, subprocess for a command.
_OWN_TIMEOUT = re.compile(r"DataLoader timed out after|\bTimeoutExpired: Command ")
MISMATCH = (
    "op.preamble.length <= op.nbytes", "data size doesn't match expected size", "essage truncated",
    "Detected mismatch between collectives on ranks", "DDP expects same model across all ranks",
    "appears not to match sizes of the same param in process 0",
)  # fmt: skip
# The caller's own arguments, port or choice of GPU: no peer's doing.
_ARGUMENT = re.compile(
    r"enforce fail at \S{0,300}gloo/gloo/\w+\.cc|ProcessGroup(?:Gloo|MPI|UCC)::\w{1,40}: (?!.{0,80}timed? ?out)"
    r"|EADDRINUSE|[Aa]ddress already in use|invalid usage \(run|ncclInvalidUsage|invalid argument \(run|ncclInvalidArgument"
    r"|Duplicate GPU detected"
)
_COMM_WORDS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "gloo/",
    "NCCL error",
    "NCCL communicator",
    "NCCL operation",
    "ncclSystemError",
    "ncclInternalError",
    "ncclUnhandledCudaError",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "c10d",
    "NCCLUtils",
    "connectFullMesh",
    "oneCCL",
    "ProcessGroupXCCL",
    "monitoredBarrier",
    "operator name is Hccl",
    "DistributedOperationException",
)
_SOCKET_ERRORS = ("ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError", "ConnectionAbortedError")
# Libraries with connections of their own, by the modules of their exceptions.
_CLIENTS = re.compile(
    r"\s*(?:requests|urllib3|urllib\.error|http\.client|httpx|httpcore|aiohttp|botocore|aiobotocore|google|azure|grpc|redis|pymongo"
    r"|psycopg2?|sqlalchemy|paramiko|huggingface_hub|wandb|mlflow|kafka|fsspec|s3fs|ssl)\.[\w.]{1,100}(?::|$)"
)
_OF_PROGRAM = (
    "device-side assert", "illegal memory access", "misaligned address", "illegal instruction", "invalid device ordinal",
    "invalid device function", "no kernel image", "invalid program counter", "invalid configuration argument",
)  # fmt: skip
# Errors that the GPU, its link, its driver or its host is the cause of, or may be: then another GPU or a restart helps.
DEVICE_WORDS = (
    "ncorrectable ECC", "ncorrectable NVLink", "ECCNotCorrectable", "ECC_UNCORRECTABLE", "ECCUncorrectable",
    "NVLINK_UNCORRECTABLE", "NvlinkUncorrectable", "NVRM: Xid", "fallen off the bus", "GPU is lost", "GPU requires reset",
    "Unable to determine the device handle", "unspecified launch failure", "LAUNCH_FAILED", "ErrorLaunchFailure",
    "hardware stack error", "or a hardware error", "unhandled cuda error", "unhandled hip error", "ncclUnhandledCudaError",
    "system not yet initialized", "busy or unavailable", "hermal shutdown", "PCIe Bus Error: severity=Uncorrect",
    "HSA_STATUS_ERROR",
)  # fmt: skip
_DEVICE = re.compile(
    r"(?i:cuda|hip) (?:error|failure):? (?:code |no\. ?)?(?:46|214|220|226|714|719|802|999|unknown error)\b"
    r"|(?:GPU|PCIe? device|CUDA device)\b[^\n]{0,80}no longer (?:reachable|accessible|available)"
)


# Lines that speak of memory and report no lack of it: a count of none, a record below WARNING, what may or should not happen.
_NO_LACK = re.compile(
    r"(?i:out of memory|oom)[\w() -]{0,40}?[:= ] ?0(?![.\d])|\b(?:no|0|zero|without|avoid|prevent|if|when|may|might|could|would) "
    r"(?:\w+ ){0,6}(?i:out of memory|oom)|\b(?:INFO|DEBUG|TRACE)\b"
)
_GOES_ON = re.compile(r"\bWARN(?:ING)?\b.{0,200}\b(?:skip|ignor|continu|retry|recover|fall(?:ing|s)? back)")
_LACK = re.compile(r"Tried to allocate|[Kk]ill(?:ed|ing)\b|Error\b")


def is_mere_talk(text: str) -> bool:
    """Whether a line that speaks of a lack of memory reports none.

    >>> is_mere_talk("INFO mem: peak 71.2 GiB; CUDA out of memory events: 0")
    True
    >>> is_mere_talk("CUDA out of memory. Tried to allocate 2.00 GiB")
    False
    """
    return _GOES_ON.search(text) is not None or (_NO_LACK.search(text) is not None and _LACK.search(text) is None)


_BLAMES = re.compile(
    r"\b(?:ranks?|workers?|peers?|process(?:es)?)(?: of ranks?)? \[?(?P<names>\d{1,6}(?:, ?\d{1,6}){0,100})\]?.{0,60}?\b"
    r"(?:did(?: not|n't) (?:respond|answer|report|arrive|join|come|finish|return|send)|not responding|unresponsive"
    r"|returned no|timed out|(?:has |have )?(?:died|crashed|disappeared)|(?:is|are) (?:dead|missing|unreachable)"
    r"|(?:was|were) lost|failed to (?:respond|answer|join|report|arrive))\b",
    re.IGNORECASE,
)


# torch/distributed/checkpoint/api.py: all ranks raise what went wrong on some.
_CHECKPOINT = re.compile(r"CheckpointException ranks:dict_keys\(\[(?P<names>\d{1,6}(?:, \d{1,6}){0,100})\]\)")


# Of one that gave up its wait, and whom it waited for: by its number, or by the name of a file or a key of it.
_GAVE_UP = re.compile(
    r"tim(?:ed?|ing) ?out|waited|waiting for|\bwithin \d|\bafter \d[\d.]* ?s\b|\bfor \d[\d.]* ?s\b|straggl|missing|not ready"
    r"|\bno (?:heartbeat|result|answer|response|reply|message|word)\b|(?:^|\.)Empty\b",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"(?:(?:(?<![a-z])|_)(?:ranks?|workers?|peers?)[ _:#-]{0,2}\[?|missing ?[=:]? ?\[)(\d{1,6}(?:, ?\d{1,6}){0,100})",
    re.IGNORECASE,
)


def blamed(text: str, rank: int) -> str:
    """The other ranks of which an exception of `rank` says that they are gone, failed, or did not do their part; "" if of none.

    >>> blamed("RuntimeError: rank 2 did not respond within 60 s", 0), blamed("RuntimeError: rank 2 did not respond", 2)
    ('2', '')
    >>> blamed("TimeoutError: waited 600 s for /run/done_rank2", 0), blamed("RuntimeError: missing 3 keys", 0)
    ('2', '')
    """
    if rank < 0:
        return ""
    match = _CHECKPOINT.search(text) or _BLAMES.search(text)
    if match is not None:
        names = re.split(", ?", match["names"])
        return "" if str(rank) in names else ",".join(names)
    found = _NAMED.findall(text) if _GAVE_UP.search(text) else []
    return ",".join(sorted({name for names in found for name in re.split(", ?", names)} - {str(rank)}, key=int))


def has_any(text: str, words: tuple[str, ...]) -> bool:
    """Whether one of `words` stands in the text."""
    return any(word in text for word in words)


def kind_of_error(text: str, *, is_torch: bool = True) -> EventKind:
    """Classify an error: the program's own, its GPU's, or the symptom of a peer's trouble. `is_torch`: torch may have raised
    it."""
    if has_any(text, MISMATCH):
        return EventKind.COMM_MISMATCH
    if _ARGUMENT.search(text) or _OWN_TIMEOUT.search(text):
        return EventKind.EXCEPTION
    is_comm = has_any(text, _COMM_WORDS)
    if not is_torch and not is_comm and (text.lstrip().startswith(_SOCKET_ERRORS) or _CLIENTS.match(text)):
        return EventKind.EXCEPTION
    if has_any(text, OOM_WORDS):
        return EventKind.OOM
    if has_any(text, _OF_PROGRAM):
        return EventKind.EXCEPTION
    if has_any(text, DEVICE_WORDS) or _DEVICE.search(text):
        return EventKind.DEVICE_ERROR
    if has_any(text, _CLOSED_WORDS):
        return EventKind.COMM_CLOSED
    if _TIMEOUT.search(text):
        return EventKind.COMM_TIMEOUT
    return EventKind.COMM_ERROR if is_comm else EventKind.EXCEPTION
