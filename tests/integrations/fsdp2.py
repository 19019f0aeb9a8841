"""FSDP2 by Accelerate on CPUs. Accelerate 1.15 offers it on accelerators alone; its code runs on gloo all the same."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def fresh_accelerator(**settings: Any) -> Accelerator:
    """An accelerator on CPUs in a process that may have had another one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **settings)


def shard(accelerator: Accelerator) -> None:
    """Let what `accelerator` prepares from here on be divided by FSDP2."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
