"""torchtitan 0.3.0's models on CPU and gloo; needs an environment with torchtitan.

torchtitan reads the accelerator's name from torch at import, so this module patches it to "cpu" first. FlexAttention has no
backward on CPU, so torchtitan's ScaledDotProductAttention replaces it; of its SPMD backends only "partial_dtensor" works with
FSDP here. Everything else is its public API: model registry, parallelize, pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
VOCABULARY = 2048  # of its debug models


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanModel:
    """This rank's model parts. Every step runs in `context()`; `schedule` runs a pipeline's microbatches (None without one)."""

    parts: list[nn.Module]
    dims: Any
    context: Callable[[], AbstractContextManager[None]]
    schedule: Any = None
    is_first: bool = True
    is_last: bool = True


def debug_spec() -> Any:
    """torchtitan's Llama "debugmodel": 6 layers, dim 256."""
    from torchtitan.models.llama3 import model_registry

    return model_registry("debugmodel")


def mixture_spec(layers: int) -> Any:
    """The first layers of torchtitan's Qwen3 "debugmodel_moe": dim 256, 64 experts of 768, 8 for each token.

    Tokens go to the experts in turn: what torchtitan's trainer makes of `debug.moe_force_load_balance`.
    """
    from torchtitan.models.qwen3 import model_registry

    spec = model_registry("debugmodel_moe")
    del spec.model.layers[layers:]
    for layer in spec.model.layers:
        layer.moe.router._debug_force_load_balance = True
    return spec


def token_loss(vocabulary: int = VOCABULARY) -> Any:
    """torchtitan's plain loss on full logits."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig

    return CrossEntropyLoss.Config(global_vocab_size=vocabulary).build(compile_config=CompileConfig())


def build(
    spec: Any,
    *,
    local_batch_size: int,
    seq_len: int,
    dp_shard: int | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
) -> TitanModel:
    """The model of `spec` with random weights, fp32, on the mesh of all ranks (`dp_shard` None: FSDP2 over all)."""
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor", data_parallel_shard_degree=dp_shard or dist.get_world_size(),
        tensor_parallel_degree=tp, pipeline_parallel_degree=pp, expert_parallel_degree=ep,
        pipeline_parallel_first_stage_less_layers=0, pipeline_parallel_last_stage_less_layers=0,
        pipeline_parallel_microbatch_size=max(1, local_batch_size // 2),
    )  # fmt: skip
    training = TrainingConfig(local_batch_size=local_batch_size, seq_len=seq_len, mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(parallelism.spmd_backend)
    shared: dict[str, Any] = {
        "parallel_dims": dims, "training": training, "parallelism": parallelism, "compile_config": CompileConfig(),
        "ac_config": None, "dump_folder": "",
    }  # fmt: skip
    # the fields of torchtitan's config that the model reads
    spec.model.update_from_config(
        config=argparse.Namespace(training=training, parallelism=parallelism, debug=DebugConfig())
    )
    with torch.device("meta"):
        model = spec.model.build()
    context = titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    if pp == 1:
        return TitanModel(parts=_started([spec.parallelize_fn(model, **shared)]), dims=dims, context=context)
    schedule, parts, is_first, is_last = spec.pipelining_fn(
        model, device=torch.device("cpu"), model_config=spec.model, parallelize_fn=spec.parallelize_fn,
        loss_fn=token_loss(), **shared,
    )  # fmt: skip
    return TitanModel(
        parts=_started(parts), dims=dims, context=context, schedule=schedule, is_first=is_first, is_last=is_last
    )


def _started(parts: list[nn.Module]) -> list[nn.Module]:
    """Materialise the parts and initialise their weights."""
    torch.manual_seed(0)
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)  # type: ignore[operator]
        part.train()
    return parts


class TitanTrainState:
    """The trainer state of torchtitan, under its names."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]
