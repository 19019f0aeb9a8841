"""What a recorder says of its process, beside the black box: host, process number, attempt, groups, clock."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist


def process_facts() -> dict[str, Any]:
    """Of this process, at this moment."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launch": launch(),
        "groups": _groups(),
        "clock": {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()},
        "utc_offset_s": time.localtime().tm_gmtoff,
        "torch": torch.__version__,
    }


def launch() -> dict[str, str]:
    """What tells this attempt of a job from another: equal on all ranks; `restart` and `parent`, on a host."""
    value = os.environ.get
    return {
        "run": value("TORCHELASTIC_RUN_ID", ""),
        "master": f"{value('MASTER_ADDR', '')}:{value('MASTER_PORT', '')}",
        "job": f"{value('SLURM_JOB_ID', '')}.{value('SLURM_STEP_ID', '')}.{value('SLURM_RESTART_COUNT', '')}",
        "restart": value("TORCHELASTIC_RESTART_COUNT", ""),
        "parent": str(os.getppid()),
    }


def _groups() -> list[dict[str, Any]]:
    """Every process group of this process, with its members as global ranks."""
    world = dist.distributed_c10d._world
    return [
        {"name": group.group_name, "description": group.group_desc, "members": sorted(members)}
        for group, members in list(world.pg_group_ranks.items())
        if isinstance(group, dist.ProcessGroup)  # a destroyed group leaves an int
    ]
