"""The digest of values: the same however they are stored and divided, another one for other values."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.loading import values_digest
from titan_ckpt.loading.values_digest import Part, combine, stored_values_digest, sum_of
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.sharding.placement import Box
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.frozen_weights import _joined, _sums
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from tools.rank_pool import RankPool
from tools.training.curves import SMALL


def digest_of(name: str, values: Tensor) -> str:
    part = Part(name, tuple(values.shape), Box.whole(tuple(values.shape)))
    return combine({part: sum_of(values, part)})


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    return st.sets(st.integers(0, length), max_size=3).map(lambda found: sorted({0, length, *found}))


@given(
    st.lists(st.integers(1, 7), max_size=3).flatmap(lambda s: st.tuples(st.just(s), *map(cuts, s))), st.integers(1, 99)
)
def test_boxes_of_any_division_add_up(division: tuple[list[int], ...], at_once: int) -> None:
    shape, *places = division
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    boxes = [Box((), ())]
    for cut in places:
        boxes = [Box((*box.offsets, start), (*box.sizes, end - start)) for box in boxes for start, end in pairwise(cut)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values_digest, "AT_ONCE", at_once)
        sums = {}
        for box in boxes:
            part = Part("w", tuple(shape), box)
            index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            sums[part] = sum_of(values[index], part)
    assert combine(sums) == digest_of("w", values)


def test_the_dtype_does_not_count_but_the_value_does() -> None:
    narrow = torch.randn(5, 7).bfloat16()
    assert digest_of("w", narrow) == digest_of("w", narrow.float()) == digest_of("w", narrow.t().contiguous().t())
    assert digest_of("w", narrow) != digest_of("v", narrow)


def test_other_values_have_another_digest() -> None:
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    others = {
        "one value": values.clone().index_put_((torch.tensor(3), torch.tensor(4)), torch.tensor(0.5)),
        "last bit": (values.view(torch.int32) ^ (torch.arange(48).view(6, 8) == 17)).view(torch.float32),
        "sign": -values, "scale": values * 1.5, "twice": values * 2, "rows": values.flip(0), "columns": values.flip(1),
        "two rows": values[[1, 0, 2, 3, 4, 5]], "transposed": values.t().contiguous().view(6, 8), "shifted": values.roll(1),
        "shape": values.view(8, 6), "flat": values.flatten(), "zero": torch.zeros(6, 8), "bfloat16": values.bfloat16(),
    }  # fmt: skip
    found = {name: digest_of("w", other) for name, other in others.items()} | {"same": digest_of("w", values)}
    assert len(set(found.values())) == len(found), found


def test_the_digest_of_a_release_is_pinned() -> None:
    """It is in checkpoints: another one would refuse every adapter."""
    assert digest_of("w", torch.arange(12.0).view(3, 4) - 5.5) == "196601a571f2226197ea88b220511e81"


@pytest.mark.parametrize("codec", ["raw", "planes-zstd"])
def test_a_stored_model_has_the_digest_of_its_values(tmp_path: Path, codec: str) -> None:
    model = {"a": torch.randn(300, 50), "b": torch.tensor(2.5), "c": torch.randn(0, 3)}
    state = {"model": model, "n": torch.ones(2)}
    save(str(tmp_path / "run"), state, step=1, options=SaveOptions(codec=codec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values_digest, "READ_AT_ONCE", 1000)
        found = stored_values_digest(
            open_checkpoint(str(tmp_path / "run")), [f"model.{n}" for n in "cab"], prefix="model."
        )
    parts = {name: Part(name, tuple(value.shape), Box.whole(tuple(value.shape))) for name, value in model.items()}
    assert found == combine({part: sum_of(model[name], part) for name, part in parts.items()})


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _digest_on(_rank: int, parallel: ParallelConfig) -> str:
    mesh = mesh_spec(parallel, 4)
    model = build_parallel_model(decoder(SMALL), parallel, mesh, device=torch.device("cpu"), seed=1)
    control = ControlGroup(timeout_s=60)
    gathered = control.gather(_sums(model.model_state(), model))
    return control.from_first(lambda: combine(_joined(gathered, "x")))  # type: ignore[arg-type]


@pytest.mark.dist
def test_three_meshes_have_one_digest(ranks: RankPool) -> None:
    meshes = [
        ParallelConfig(dp_shard=4), ParallelConfig(tp=2, dp_shard=2), ParallelConfig(pp=2, dp_replicate=2, microbatches=2),
    ]  # fmt: skip
    found = {digest for mesh in meshes for digest in ranks.run(_digest_on, mesh)}
    assert len(found) == 1
