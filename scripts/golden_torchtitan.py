"""Train and save tiny models with torchtitan 0.3.0: the data of the tests that resume from its checkpoints.

    torchrun --nproc-per-node 2 -m scripts.golden_torchtitan tests/data/torchtitan    # in an environment that has torchtitan

Uses torchtitan's FSDP2, AdamW and CheckpointManager: llama with q, k and v fused; qwen3 unfused with a tied head.
`after.json` beside each run holds the losses of torchtitan's own next steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from titan_ckpt.trainer.model.decoder import ModelConfig
from tools.training.torchtitan_model import TitanTrainState, build, token_loss
from tools.training.torchtitan_runs import AFTER, BATCH, BEFORE, LENGTH, MODELS, OPTIMIZER, tokens


def spec_of(name: str, model: ModelConfig) -> Any:
    """torchtitan's debug model of a family, as small as `model`."""
    home = import_module(f"torchtitan.models.{'llama3' if name == 'llama' else name}")
    spec = home.model_registry("debugmodel")
    sizes = {"n_layers": model.n_layers, "dim": model.dim, "n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads}
    rope = spec.model.layers[0].attention.rope
    rope.dim, rope.max_seq_len = model.head_size, model.max_seq_len
    shared = {"hidden_dim": model.ffn_dim, "rope": rope, "attn_backend": "flex"}
    if name == "llama":
        spec.model.layers = home._build_llama3_layers(**sizes, **shared)
    else:
        spec.model.layers = home._build_qwen3_layers(**sizes, **shared, head_dim=model.head_size, fuse_qkv=False)
    spec.model.dim, spec.model.vocab_size = model.dim, model.vocab_size
    spec.model.tok_embeddings.num_embeddings = spec.model.lm_head.out_features = model.vocab_size
    spec.model.tok_embeddings.embedding_dim = spec.model.lm_head.in_features = model.dim
    spec.model.norm.normalized_shape = model.dim
    return spec


class Samples(IterableDataset[torch.Tensor]):
    """This rank's samples, step after step."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.step = rank, world, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.step += 1
            yield from tokens(self.step - 1)[self.rank :: self.world]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(name: str, folder: Path) -> list[float]:
    """Train, save, train on; the losses after the save."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(spec_of(name, MODELS[name]), local_batch_size=BATCH // world, seq_len=LENGTH)
    loss_fn, progress = token_loss(MODELS[name].vocab_size), TitanTrainState()
    asked = {"lr": OPTIMIZER.lr, "betas": OPTIMIZER.betas, "eps": OPTIMIZER.eps, "weight_decay": OPTIMIZER.weight_decay}
    optimizer = default_adamw(**asked).build(model_parts=model.parts)
    data = ParallelAwareDataloader(Samples(rank, world), rank, world, batch_size=BATCH // world)
    manager = CheckpointManager.Config(enable=True, interval=BEFORE, keep_latest_k=0).build(
        dataloader=data, model_parts=model.parts, optimizers=optimizer, sd_adapter=None, base_folder=str(folder),
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizer, training_steps=10),
        states={"train_state": progress},
    )  # fmt: skip
    batches, losses = iter(data), []
    while progress.step < BEFORE + AFTER:
        mine = next(batches)
        optimizer.zero_grad()
        with model.context():
            logits = model.parts[0](mine[:, :-1].contiguous())
            loss, _ = loss_fn(logits, mine[:, 1:].contiguous(), torch.tensor(BATCH * LENGTH))
            loss.backward()
        optimizer.step()
        progress.step += 1
        progress.ntokens_seen += mine[:, 1:].numel()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
        if progress.step == BEFORE:
            manager.save(progress.step)
    manager.close()
    return losses[BEFORE:]


def main() -> int:
    """Write into a new folder."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.golden_torchtitan", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    if folder.exists():
        parser.error(f"{folder} exists; golden checkpoints are never rewritten")
    dist.init_process_group("gloo")
    dist.barrier()  # no rank writes before all ranks have checked
    for name in MODELS:
        losses = train(name, folder / name)
        if dist.get_rank() == 0:
            (folder / name / "after.json").write_text(json.dumps(losses) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
