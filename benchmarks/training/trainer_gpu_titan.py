"""torchtitan 0.3.0's side of trainer_gpu.py: one rank; runs in an environment that has torchtitan.

Its public path: model registry, converters, parallelize, loss, optimizer, clipping; SDPA replaces FlexAttention, as on
our side. On a CPU (`--tiny`) the script sets torch's device before torchtitan queries it, and Float8 is emulated
uncompiled, the only mode torchtitan supports there.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from benchmarks.training.turns import take_turns


def model_spec(job: dict[str, Any]) -> Any:
    """Its own Llama: "1B", or for --tiny "debugmodel"."""
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    converters = []
    if job["float8"]:
        is_compiled = job["compile"] and not job["is_tiny"]
        converters = [
            Float8LinearConverter.Config(
                recipe_name=job["float8"],
                filter_fqns=["lm_head"],
                emulate=job["is_tiny"],
                model_compile_enabled=is_compiled,
            )
        ]
    spec = model_registry("debugmodel" if job["is_tiny"] else "1B", converters=converters)
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def compiling(job: dict[str, Any]) -> Any:
    """Whether its blocks are compiled: not with Float8 on a CPU."""
    from torchtitan.config import CompileConfig

    return CompileConfig(enable=job["compile"] and not (job["is_tiny"] and bool(job["float8"])))


def build(spec: Any, job: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """Its model on the device, and the context that its steps run in."""
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    training = TrainingConfig(local_batch_size=job["samples"], seq_len=job["seq_len"])
    dims = ParallelDims.from_config(parallelism, 1)
    dims.build_mesh()
    titan.set_spmd_backend(parallelism.spmd_backend)
    compile_config = compiling(job)
    # the part of its config that the model reads
    whole = argparse.Namespace(training=training, parallelism=parallelism, debug=DebugConfig())
    spec.model.update_from_config(config=whole)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=compile_config, ac_config=None,
        dump_folder="",
    )  # fmt: skip
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return model, titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)


def main(job: dict[str, Any]) -> None:
    """Train on random tokens, a step at a time."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.distributed import utils as titan

    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    spec = model_spec(job)
    vocab_size = spec.model.vocab_size
    model, context = build(spec, job, device)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=vocab_size).build(compile_config=compiling(job))
    optimizer = default_adamw(lr=1e-4).build(model_parts=[model])
    valid = torch.tensor(job["samples"] * job["seq_len"], device=device)

    def step() -> None:
        tokens = torch.randint(0, vocab_size, (job["samples"], job["seq_len"] + 1), device=device)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer.zero_grad()
        with context():
            loss, _ = loss_fn(model(inputs), labels, valid)
            loss.backward()
        titan.clip_grad_norm_(list(model.parameters()), 1.0, foreach=True, pp_mesh=None)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    take_turns(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    torch._utils._get_available_device_type = lambda: options["device"]
    main(options)
