"""What a process writes while it ends of an error, and whether it wrote anything else after one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from titan_ckpt.debug.incident.records import LogEvent, RankRecord

# What torch, the interpreter and trackers write while a process ends of an exception.
_PARTING = (
    "WorkerServer.cpp",
    "destroy_process_group",
    "resource_tracker",
    "warnings.warn(",
    "Exception ignored",
    "wandb:",
    "CUDA kernel errors might be asynchronously reported",  # this and the next three are of CUDA's own message
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_USE_CUDA_DSA",
    "Device-side assertion tracking was not enabled",
)
_CONTINUES = re.compile(r"(?:\[[^\]\n]{1,40}\]:? )?[ \t]+\S")  # the message of the line before, on a line of its own
# What torch writes below an error of NCCL, its reason on the next line (torch/csrc/distributed/c10d/NCCLUtils.cpp).
_OF_NCCL, _REASON = re.compile(r"nccl[A-Z]\w{3,40}: |Last error:"), "Last error:"


# What a program says that went on with its work.
_AT_WORK = re.compile(
    r"(?i)\b(?:sav(?:ing|ed)|wrote|finished|done|completed?|upload(?:ing|ed)|evaluat(?:ing|ed)|skipp(?:ing|ed)|resum(?:ing|ed))\b"
)
_IN_VAIN = re.compile(
    r"(?i)\b(?:not|never|before|until|cannot|can't|fail\w{0,4}|abort\w{0,3}|error|exception|crash\w{0,3})\b"
)


def wrote_on(record: RankRecord, event: LogEvent) -> bool:
    """Whether the rank logged anything after an error but what a process writes while it ends."""
    return any(_later_lines(record, event))


def told_of_more(record: RankRecord, event: LogEvent) -> bool:
    """Whether the rank told after an error of work that it did."""
    return any(_AT_WORK.search(line) and not _IN_VAIN.search(line) for line in _later_lines(record, event))


def _later_lines(record: RankRecord, event: LogEvent) -> Iterator[str]:
    """The last lines of a rank that follow an error in its file, but for those that a process writes while it ends."""
    log = record.log
    if log is None or log.source != event.source or log.tail_line <= event.line:
        return
    last = max((n for n, line in enumerate(log.tail) if event.text[:100] in line), default=-1)
    later = [line for line in log.tail[last + 1 :] if line.strip() and not _CONTINUES.match(line)]
    reasons = {n + 1 for n, line in enumerate(later) if _REASON in line}
    own = (line for n, line in enumerate(later) if n not in reasons and not _OF_NCCL.search(line))
    yield from (line for line in own if not any(word in line for word in _PARTING))
