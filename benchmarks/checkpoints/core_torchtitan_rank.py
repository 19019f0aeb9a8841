"""For core_torchtitan.py: one torchtitan 0.3.0 rank trains the debug model and saves by its CheckpointManager.

Prints the loss of each step as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from tools.training.torchtitan_model import VOCABULARY, TitanTrainState, build, debug_spec, token_loss

BATCH, LENGTH, STEPS, MORE = 4, 64, 3, 2


class Tokens(IterableDataset[torch.Tensor]):
    """Samples that depend only on their index, and a position that torchtitan's dataloader saves."""

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


def main(folder: str, resume_from: str | None) -> None:
    """Train, save step 3 in `folder` and continue; or resume from a checkpoint in another folder."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(debug_spec(), local_batch_size=BATCH, seq_len=LENGTH)
    loss_fn = token_loss()
    optimizer = default_adamw(lr=1e-3).build(model_parts=model.parts)
    schedule = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizer, training_steps=10)
    data = ParallelAwareDataloader(Tokens(rank, world), rank, world, batch_size=BATCH)
    progress = TitanTrainState()
    config = CheckpointManager.Config(
        enable=True, interval=STEPS, keep_latest_k=0, initial_load_path=resume_from, initial_load_model_only=False
    )
    manager = config.build(
        dataloader=data, model_parts=model.parts, optimizers=optimizer, lr_schedulers=schedule,
        states={"train_state": progress}, sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    manager.load()
    batches, losses = iter(data), []
    while progress.step < STEPS + MORE:
        tokens = next(batches)
        optimizer.zero_grad()
        with model.context():
            logits = model.parts[0](tokens[:, :-1].contiguous())
            loss, _ = loss_fn(logits, tokens[:, 1:].contiguous(), torch.tensor(BATCH * LENGTH * world))
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
