"""Save a small checkpoint with Megatron-Core's dist_checkpointing (torch_dist): the data of the test that reads it.

    pip install --no-deps --target FOLDER megatron-core==0.16.1
    PYTHONPATH=.:FOLDER torchrun --nproc-per-node 2 -m tools.golden_megatron tests/data/megatron

Megatron-Core asks for a CUDA device where it synchronizes and counts failures; without one the CPU takes its place.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

STEP = 1000


def _without_cuda() -> None:
    if not torch.cuda.is_available():
        for name, stand_in in {"synchronize": lambda *_: None, "current_device": lambda: "cpu"}.items():
            setattr(torch.cuda, name, stand_in)


def main(folder: Path) -> None:
    """A tensor cut over two ranks, a replicated one, an object of each rank, and common values."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saving = import_module("megatron.core.dist_checkpointing")
    strategy = import_module("megatron.core.dist_checkpointing.strategies.torch").TorchDistSaveShardedStrategy
    objects = import_module("megatron.core.dist_checkpointing.mapping").ShardedObject
    whole = torch.arange(64 * 8, dtype=torch.float32).view(64, 8)
    cut = saving.ShardedTensor.from_rank_offsets
    name = "decoder.layers.self_attention.linear_qkv.weight"
    state = {
        "model": {
            "qkv": cut(name, whole.chunk(ranks)[rank].contiguous(), (0, rank, ranks)),
            "norm": cut("decoder.final_layernorm.weight", torch.ones(8, dtype=torch.bfloat16), replica_id=rank),
        },
        "rng": objects("rng_state", [torch.arange(4)], (ranks,), (rank,)),
        "iteration": STEP,
    }
    step = folder / f"iter_{STEP:07d}"
    step.mkdir(parents=True, exist_ok=True)
    saving.save(state, str(step), strategy("torch_dist", 1, thread_count=1))
    if rank == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    dist.destroy_process_group()


if __name__ == "__main__":
    _without_cuda()
    main(Path(sys.argv[1]))
