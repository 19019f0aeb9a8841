"""Asynchronous tensor parallelism by the compiler, through symmetric memory."""

from __future__ import annotations

import torch
import torch._inductor.config
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh

from titan_ckpt.errors import ConfigError


def overlap_in_compiled_blocks(mesh: DeviceMesh, device: torch.device) -> None:
    """Let the compiler split a region's collectives and products into pieces that overlap; ConfigError but on GPUs."""
    if device.type != "cuda":
        raise ConfigError(
            f"async_tp in compiled blocks copies between GPUs through symmetric memory; this device is {device}: "
            "set mesh.compile = false, or mesh.async_tp = false"
        )
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
