"""How near a router's choices come to others.

Scores of two meshes differ by what float32 rounds, which Adam's first updates enlarge where gradients are tiny: a gap between the
worst chosen score and the best other one that is smaller than this may be decided either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from titan_ckpt.trainer.model.experts import Router
from tools.training.curves import Curve

NEAR = 5e-5  # of a score; over 20 steps the scores of two meshes came to differ by up to 4e-5
KEPT = 16  # gaps of a call, the smallest


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherChoice:
    """The first step and router that sent tokens elsewhere. So many of its tokens have a gap of at most `gap`."""

    step: int
    router: str
    tokens: int
    gap: float


@contextmanager
def watched_gaps() -> Iterator[list[list[float]]]:
    """For each call of a router within, in turn, the smallest gaps of its tokens, ascending."""
    gaps: list[list[float]] = []
    choose = Router.choose

    def watch(router: Router, scores_TE: Tensor) -> Tensor:
        gaps.append(smallest_gaps(router, scores_TE))
        return choose(router, scores_TE)

    with mock.patch.object(Router, "choose", watch):
        yield gaps


@torch.no_grad()
def smallest_gaps(router: Router, scores_TE: Tensor) -> list[float]:
    """The relative gaps between a chosen and another expert or group, of the tokens where they are smallest."""
    config = router.config
    gap_T = _gaps(router.open_scores(scores_TE), config.per_token)
    if config.groups > 1:
        biased_TE = scores_TE if router.correction is None else scores_TE + router.correction
        best_TGE = biased_TE.view(len(scores_TE), config.groups, -1).topk(config.group_best, dim=-1).values
        gap_T = gap_T.minimum(_gaps(best_TGE.sum(dim=-1), config.groups_per_token))
    return gap_T.sort().values[:KEPT].tolist()


def _gaps(scores_TE: Tensor, chosen: int) -> Tensor:
    worst_T, other_T = scores_TE.topk(chosen + 1, dim=-1).values[:, -2:].unbind(dim=1)
    return (worst_T - other_T) / worst_T.abs()


def first_other_choice(found: Curve, expected: Curve, gaps: list[list[float]]) -> OtherChoice | None:
    """Where the loads of two curves part; `gaps` are those of the expected one."""
    routers, width = list(expected.loads), len(expected.loads[next(iter(expected.loads))])
    experts = width // len(expected.norms)
    for step in range(len(expected.norms)):
        own = slice(step * experts, (step + 1) * experts)
        for number, router in enumerate(routers):
            pairs = zip(found.loads[router][own], expected.loads[router][own], strict=True)
            if moved := sum(max(a - b, 0) for a, b in pairs):
                near = gaps[step * len(routers) + number]
                gap = near[moved - 1] if moved <= len(near) else math.inf
                return OtherChoice(step=step, router=router, tokens=moved, gap=gap)
    return None
