"""What a process writes while it ends of an error, and whether it wrote anything else after one."""

from __future__ import annotations

import re

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


def wrote_on(record: RankRecord, event: LogEvent) -> bool:
    """Whether the rank logged anything after an error but what a process writes while it ends."""
    log = record.log
    if log is None or log.source != event.source or log.tail_line <= event.line:
        return False
    last = max((n for n, line in enumerate(log.tail) if event.text[:100] in line), default=-1)
    later = [line for line in log.tail[last + 1 :] if line.strip() and not _CONTINUES.match(line)]
    reasons = {n + 1 for n, line in enumerate(later) if _REASON in line}
    own = (line for n, line in enumerate(later) if n not in reasons and not _OF_NCCL.search(line))
    return any(not any(word in line for word in _PARTING) for line in own)
