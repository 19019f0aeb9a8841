"""One rank of torchtitan 0.3.0 that trains its debug model and saves by its own CheckpointManager, for core_torchtitan.py.

torchtitan takes the accelerator's name from torch at import, so torch is told "cpu" first; its FlexAttention has no backward
on CPU, so its own ScaledDotProductAttention stands in. All else is its public path. Prints the loss of each step as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
BATCH, LENGTH, VOCABULARY, STEPS, MORE = 4, 64, 2048, 3, 2


class Tokens(IterableDataset[torch.Tensor]):
    """Samples that depend on their number alone, and a position that torchtitan's dataloader saves."""

    def __init__(self, rank: int, count: int) -> None:
        self.at, self.count = rank, count

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            generator = torch.Generator().manual_seed(self.at)
            self.at += self.count
            yield torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Progress:
    """The trainer's own state, under torchtitan's names."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def build() -> tuple[Any, Any]:
    """The debug model under FSDP2 on all ranks, and the SPMD context that its steps run in."""
    from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    world = dist.get_world_size()
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=world)
    training = TrainingConfig(local_batch_size=BATCH, seq_len=LENGTH, mixed_precision_param="float32")
    dims = ParallelDims.from_config(parallelism, world)
    dims.build_mesh()
    titan.set_spmd_backend(parallelism.spmd_backend)
    whole = argparse.Namespace(
        training=training, parallelism=parallelism, debug=DebugConfig()
    )  # what of it the model reads
    spec.model.update_from_config(config=whole)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(),
        ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    return model, titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)


def main(folder: str, resume_from: str | None) -> None:
    """Train, save step 3 in `folder`, train on; or go on from a checkpoint that lies elsewhere."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
    from torchtitan.config import CompileConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, context = build()
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY).build(compile_config=CompileConfig())
    optimizer = default_adamw(lr=1e-3).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizer, training_steps=10)
    data = ParallelAwareDataloader(Tokens(rank, world), rank, world, batch_size=BATCH)
    progress = Progress()
    config = CheckpointManager.Config(
        enable=True, interval=STEPS, keep_latest_k=0, initial_load_path=resume_from, initial_load_model_only=False
    )
    manager = config.build(
        dataloader=data, model_parts=[model], optimizers=optimizer, lr_schedulers=schedule,
        states={"train_state": progress}, sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    manager.load()
    batches, losses = iter(data), []
    while progress.step < STEPS + MORE:
        tokens = next(batches)
        optimizer.zero_grad()
        with context():
            loss, _ = loss_fn(
                model(tokens[:, :-1].contiguous()), tokens[:, 1:].contiguous(), torch.tensor(BATCH * LENGTH * world)
            )
            loss.backward()
        optimizer.step()
        schedule.step()
        progress.step += 1
        progress.ntokens_seen += BATCH * LENGTH * world
        losses.append(loss.detach().item())
        if resume_from is None:
            manager.save(progress.step)
    manager.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(json.dumps({"rank": rank, "losses": losses[-MORE:], "steps": len(losses)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
