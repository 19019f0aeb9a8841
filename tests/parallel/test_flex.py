"""Training over packed documents with FlexAttention, on a CPU: torch's own eager kernels, without its refusal of the backward.

torch refuses the backward on a CPU since its compiled kernels have none there; the eager ones are whole (torch 2.13,
torch/_higher_order_ops/flex_attention.py), and give the losses of SDPA on every mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.attention import flex_attention as torchs

from titan_ckpt.trainer.model.attention import FlexAttend
from titan_ckpt.trainer.parallel import parallelize
from tools.rank_pool import RankPool
from tools.training.curves import EVERYTHING, GPT_OSS, Curve, CurveCase, relative_error, single, train
from tools.training.mesh_cases import mesh

WITHIN = 1e-5
CASES = {
    "documents, window": CurveCase(model=EVERYTHING, has_documents=True, steps=6),
    "sinks": CurveCase(
        model=GPT_OSS, has_documents=True, steps=4
    ),  # longer, and rounding sends tokens to other experts
}
MESHES = {
    "cp x fsdp": {"cp": 2, "cp_method": "all_gather"},
    "cp x tp": {"cp": 2, "tp": 2, "cp_method": "all_gather"},
    "pp x cp": {"pp": 2, "cp": 2, "cp_method": "all_gather"},
}
_calls = [0]


def _counted(*given: Any, **options: Any) -> Any:
    _calls[0] += 1
    return torchs.flex_attention(*given, **options)


def _uncompiled(self: FlexAttend, window: int | None = None, scale: float | None = None) -> None:
    self.window, self.scale, self.kernel = window, scale, _counted


def _train_by_flex(rank: int, case: CurveCase) -> tuple[Curve, int]:
    setattr(torchs, "_validate_device", lambda *_: None)  # noqa: B010 - mypy knows the function alone
    setattr(parallelize, "check_on_cpu", lambda _: None)  # noqa: B010
    setattr(FlexAttend, "__init__", _uncompiled)  # noqa: B010
    _calls[0] = 0
    return train(rank, case), _calls[0]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[CurveCase, Curve]:
    found = CASES[request.param]
    curve = single(found)
    assert not dist.is_initialized()
    return found, curve


@pytest.mark.dist
@pytest.mark.parametrize("name", MESHES)
def test_training_with_flex_attention_is_that_with_sdpa(
    name: str, ranks: RankPool, case: tuple[CurveCase, Curve]
) -> None:
    job, expected = case
    for curve, calls in ranks.run(_train_by_flex, replace(job, parallel=mesh(attention="flex", **MESHES[name]))):
        assert calls >= job.steps
        assert relative_error(curve.losses, expected.losses) < WITHIN
        assert relative_error(curve.norms, expected.norms) < 10 * WITHIN


@pytest.mark.dist
@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_documents_are_kept_apart_over_stages_and_cp(
    method: str, ranks: RankPool, case: tuple[CurveCase, Curve]
) -> None:
    job, expected = case
    for curve in ranks.run(train, replace(job, parallel=mesh(pp=2, cp=2, cp_method=method))):
        assert relative_error(curve.losses, expected.losses) < WITHIN
