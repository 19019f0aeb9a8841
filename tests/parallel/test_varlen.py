"""Attention over packed documents by torch's `varlen_attn`: the pieces that it is given, and the result of its arithmetic."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError, DataError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.attention import Attend, SdpaAttend, visibility_mask
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.parallel import varlen
from titan_ckpt.trainer.parallel.config import check_fits
from titan_ckpt.trainer.parallel.context import AllGatherAttend, head_tail_positions
from titan_ckpt.trainer.parallel.varlen import VarlenAttend, pieces_of
from tools.paths import DEBUG_CONFIG
from tools.rank_pool import RankPool
from tools.training.curves import GPT_OSS, SMALL, CurveCase, single
from tools.training.mesh_cases import mesh


def _arithmetic(
    q_NHK: Tensor, k_NGK: Tensor, v_NGK: Tensor, queries_P1: Tensor, keys_P1: Tensor, *longest: int,
    window_size: tuple[int, int], scale: float | None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `varlen_attn` documents, differentiable on a CPU."""
    assert longest == (int(queries_P1.diff().max()), int(keys_P1.diff().max()))
    assert window_size[1] == 0
    outs = []
    for (a, b), (c, d) in zip(queries_P1.unfold(0, 2, 1).tolist(), keys_P1.unfold(0, 2, 1).tolist(), strict=True):
        seen = _bottom_right(b - a, d - c, window_size[0])
        q, k, v = (x.transpose(0, 1) for x in (q_NHK[a:b], k_NGK[c:d], v_NGK[c:d]))
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(outs, dim=1).transpose(0, 1)


def _bottom_right(queries: int, keys: int, reach: int) -> Tensor:
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    return (distance >= 0) & ((distance <= reach) | (reach < 0))


def _documents(rng: random.Random, batch: int, width: int) -> Tensor:
    rows = [[int(rng.random() < 0.15) for _ in range(width)] for _ in range(batch)]
    return torch.tensor(rows).cumsum(1)


@pytest.mark.parametrize("seed", range(30))
def test_the_pieces_of_all_ranks_see_what_a_mask_shows(seed: int) -> None:
    rng = random.Random(seed)
    batch, degree = rng.randint(1, 3), rng.choice([1, 2, 3, 4])
    width = 2 * degree * rng.randint(1, 5)
    documents_BW = _documents(rng, batch, width)
    for rank in range(degree):
        at_S = head_tail_positions(width, degree, rank)
        pieces = pieces_of(at_S, documents_BW)
        seen = torch.zeros(batch * len(at_S), batch * width, dtype=torch.bool)
        for n in range(len(pieces.keys_P1) - 1):
            (a, b), (c, d) = pieces.queries_P1[n : n + 2].tolist(), pieces.keys_P1[n : n + 2].tolist()
            seen[a:b, pieces.wanted_N[c:d]] = _bottom_right(b - a, d - c, -1)
        keys = torch.arange(width)[None]
        for row, own in enumerate(seen.view(batch, len(at_S), batch, width)):
            one = documents_BW[row : row + 1]
            expected = visibility_mask(at_S[None], keys, one[:, at_S], one, None)[0, 0]
            assert torch.equal(own[:, row], expected)
            assert int(own.sum()) == int(expected.sum())


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_varlen_attention_equals_sdpa(
    monkeypatch: pytest.MonkeyPatch, window: int | None, has_documents: bool, heads: tuple[int, int]
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", _arithmetic)
    documents_BS = _documents(random.Random(1), 2, 24) if has_documents else None
    positions_BS, found = torch.arange(24).expand(2, -1), []
    kernels: tuple[Attend, ...] = (SdpaAttend(window, 0.3), VarlenAttend(None, window, 0.3))
    for kernel in kernels:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 24, n, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1]))
        out = kernel(q, k, v, kernel.plan(positions_BS, documents_BS))
        torch.autograd.backward(out.square().sum())
        found.append([out.detach(), q.grad, k.grad, v.grad])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def _gathered(rank: int, window: int | None) -> list[list[Any]]:
    setattr(varlen, "varlen_attn", _arithmetic)  # noqa: B010 - mypy knows the function alone
    group, found = dist.group.WORLD, []
    assert group is not None
    documents_BS, mine_S = _documents(random.Random(2), 2, 32), head_tail_positions(32, 2, rank)
    kernels: tuple[Attend, ...] = (AllGatherAttend(group, window), VarlenAttend(group, window))
    for kernel in kernels:
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 32, n, 8)[:, mine_S].requires_grad_() for n in (4, 2, 2))
        out = kernel(q, k, v, kernel.plan(mine_S.expand(2, -1), documents_BS))
        torch.autograd.backward(out.square().sum())
        found.append([out.detach(), q.grad, k.grad, v.grad])
    return found


@pytest.mark.dist
@pytest.mark.parametrize("window", [None, 7])
def test_varlen_attention_over_gathered_keys_equals_sdpa(ranks: RankPool, window: int | None) -> None:
    for sdpas, ours in ranks.run(_gathered, window):
        torch.testing.assert_close(ours, sdpas, atol=1e-5, rtol=1e-5)


def test_varlen_attention_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match=r"attention=varlen on a CPU: torch's varlen_attn has no kernel there"):
        single(CurveCase(parallel=mesh(attention="varlen", param_dtype="bfloat16")))


SIXTEEN = {"dp_shard": 1, "param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_shard": 1}, 'attention=varlen computes in 16 bits: set mesh.param_dtype = "bfloat16"'),
        (
            {"cp": 2, "param_dtype": "bfloat16"},
            "attention=varlen with cp=2: a ring merges the results of other kernels",
        ),
        (SIXTEEN | {"model": GPT_OSS}, "this model has attention sinks, which it does not support; use flex"),
        (
            SIXTEEN | {"model": dataclasses.replace(SMALL, head_dim=12)},
            "this model's heads have 12 elements; it takes multiples of 8 up to 256",
        ),
        (SIXTEEN | {"model": dataclasses.replace(SMALL, head_dim=264)}, "this model's heads have 264 elements"),
    ],
)
def test_varlen_attention_names_what_it_cannot_do(settings: dict[str, Any], message: str) -> None:
    parallel = mesh(attention="varlen", **{name: value for name, value in settings.items() if name != "model"})
    degrees = {name: value for name, value in settings.items() if name == "cp"} or {"dp_shard": 1}
    spec = decoder(settings.get("model", SMALL))
    with pytest.raises(ConfigError, match=message):
        check_fits(spec, parallel, MeshSpec.of(degrees), seq_len=48, microbatch_size=8)


def test_attention_sinks_are_refused() -> None:
    q = torch.zeros(1, 4, 2, 8)
    kernel = VarlenAttend(None)
    with pytest.raises(ConfigError, match="this model has attention sinks, which it does not support; use flex"):
        kernel(q, q, q, kernel.plan(torch.arange(4)[None], None), torch.zeros(2))


@pytest.mark.parametrize("heads", [12, 264])
def test_heads_of_other_sizes_are_refused(heads: int) -> None:
    q = torch.zeros(1, 4, 2, heads)
    kernel = VarlenAttend(None)
    with pytest.raises(ConfigError, match=f"this model's heads have {heads} elements"):
        kernel(q, q, q, kernel.plan(torch.arange(4)[None], None))


def test_a_document_that_goes_on_after_another_is_refused() -> None:
    """`sdpa` lets its tokens see those before the other one."""
    for documents in ([[0, 0, 1, 1, 0, 0]], [[0, 1, 2, 3, 4, 5], [3, 7, 7, 5, 5, 7]]):
        with pytest.raises(DataError, match=r"document [07] of a sample goes on after another one"):
            VarlenAttend(None).plan(torch.arange(6).expand(len(documents), -1), torch.tensor(documents))
    VarlenAttend(None).plan(torch.arange(4).expand(2, -1), torch.tensor([[3, 3, 1, 1], [1, 3, 3, 3]]))


@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_kernels_without_a_gpu_are_refused_before_ranks(
    attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = (
        f"mesh.attention={attention}",
        "mesh.param_dtype=bfloat16",
        "train.device=cpu",
        f"log.folder={tmp_path}/run",
    )
    words = [word for text in sets for word in ("--set", text)]
    assert main(["train", DEBUG_CONFIG, "--nproc", "2", *words]) == 2
    assert f"mesh.attention={attention} on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
