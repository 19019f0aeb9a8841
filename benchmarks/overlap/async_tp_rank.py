"""One rank of async_tp.py: what its options name, once per turn, over slow links."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.training.turns import take_turns
from titan_ckpt.trainer.parallel import collectives
from titan_ckpt.trainer.parallel.overlap.around import gather_products, parts_around, products_scatter
from tools.slow_link import slow_groups


def actions(job: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """What is timed, by name. The tokens of all ranks are `tokens`, inputs and outputs of the products `width` wide."""
    size, tokens, width = group.size(), job["tokens"], job["width"]
    part, whole, weight = (
        torch.randn(*sizes) for sizes in ((1, tokens // size, width), (1, tokens, width), (width, width))
    )

    def around() -> None:
        for _ in parts_around(part, group):
            pass

    return {
        "product": lambda: F.linear(part, weight),
        "transfer": around,
        "all-gather": lambda: collectives.gather(part, group),
        "reduce-scatter": lambda: collectives.scatter(whole, group),
        "gathered, plain": lambda: F.linear(collectives.gather(part, group), weight),
        "gathered, ring": lambda: gather_products(part, [(weight, None)], group),
        "summed, plain": lambda: collectives.scatter(F.linear(whole, weight), group),
        "summed, ring": lambda: products_scatter(whole, weight, None, group),
    }


def main(job: dict[str, Any]) -> None:
    """An action per turn, in order, and a barrier in the turn before each."""
    torch.set_num_threads(1)
    with slow_groups(tuple(job["relay"])):
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    turns = itertools.cycle(do for action in actions(job, group).values() for do in (dist.barrier, action))

    def step() -> None:
        next(turns)()

    take_turns(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
