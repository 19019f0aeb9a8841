"""One rank of torchtitan 0.3.0 on CPU and gloo, for trainer_vs_torchtitan.py; runs in an environment that has torchtitan.

torchtitan takes the accelerator's name from torch at import, so torch is told "cpu" first. FlexAttention has no backward on
CPU, so its own ScaledDotProductAttention stands in; of its SPMD backends "partial_dtensor" is the one that gets through FSDP
here. All else is its public path: model registry, parallelize, pipeline, loss, optimizer, gradient clipping.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.turns import take_turns

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]


def main(job: dict[str, Any]) -> None:
    """Train on random tokens, a step at a time."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    torch.set_num_threads(job["threads"])
    dist.init_process_group("gloo")
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        data_parallel_shard_degree=job["dp_shard"],
        tensor_parallel_degree=job["tp"],
        pipeline_parallel_degree=job["pp"],
        pipeline_parallel_microbatch_size=job["batch_size"] // 2,
        pipeline_parallel_first_stage_less_layers=0,
        pipeline_parallel_last_stage_less_layers=0,
    )
    batch = job["batch_size"] // job["dp_shard"]
    training = TrainingConfig(local_batch_size=batch, seq_len=job["seq_len"], mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    titan.set_spmd_backend(parallelism.spmd_backend)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=2048).build(compile_config=CompileConfig())
    shared: dict[str, Any] = {
        "parallel_dims": dims,
        "training": training,
        "parallelism": parallelism,
        "compile_config": CompileConfig(),
        "ac_config": None,
        "dump_folder": "",
    }
    spec.model.update_from_config(config=Whole(training, parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    schedule, is_first, is_last = None, True, True
    if job["pp"] > 1:
        schedule, parts, is_first, is_last = spec.pipelining_fn(
            model, device=torch.device("cpu"), model_config=spec.model, parallelize_fn=spec.parallelize_fn,
            loss_fn=loss_fn, **shared,
        )  # fmt: skip
    else:
        parts = [spec.parallelize_fn(model, **shared)]
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        part.train()
    optimizer = default_adamw(lr=1e-3).build(model_parts=parts)
    context = titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    valid = torch.tensor(job["batch_size"] * job["seq_len"])

    def step() -> None:
        tokens = torch.randint(0, 2048, (batch, job["seq_len"] + 1))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        with context():
            if schedule is not None:
                losses: list[torch.Tensor] | None = [] if is_last else None
                target = labels if is_last else None
                extra = {"loss_kwargs": {"global_valid_tokens": valid}, "return_outputs": False}
                schedule.step(*((inputs,) if is_first else ()), target=target, losses=losses, **extra)
            else:
                loss, _ = loss_fn(parts[0](inputs), labels, valid)
                loss.backward()
        weights = [p for part in parts for p in part.parameters()]
        titan.clip_grad_norm_(weights, 1.0, foreach=True, pp_mesh=dims.get_optional_mesh("pp"))
        optimizer.step()

    take_turns(step)
    dist.barrier()
    dist.destroy_process_group()


class Whole:
    """The parts of torchtitan's whole config that its model reads."""

    def __init__(self, training: Any, parallelism: Any) -> None:
        self.training, self.parallelism = training, parallelism

    def __getattr__(self, name: str) -> Any:
        from torchtitan.config import DebugConfig

        if name == "debug":
            return DebugConfig()
        raise AttributeError(name)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
