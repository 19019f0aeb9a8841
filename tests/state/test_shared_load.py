"""`LoadPolicy(broadcast=True)`: what several ranks hold is read once, by whom, and what all ranks hear when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_ckpt.errors import StoreError, TitanError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.loading.shared import agreement
from titan_ckpt.loading.shared.shares import PART, Parts, assign
from titan_ckpt.loading.shared.tree import neighbours
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from tools.rank_pool import RankPool

pytestmark = pytest.mark.dist
NUM_RANKS = 4
EMBEDDING, WEIGHT, NORM, BUFFER = (512, 128), (256, 256), (8192,), (4096,)
WHOLE_BYTES = 4 * sum(int(np.prod(shape)) for shape in (EMBEDDING, WEIGHT, NORM, NORM, BUFFER))
MOST_S = 60.0
HANG_S = 10.0  # long enough for the healthy ranks to end their parts, on a slow machine too


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(NUM_RANKS) as ranks:
        yield ranks


def _values(shape: tuple[int, ...], first: float) -> torch.Tensor:
    return (torch.arange(float(np.prod(shape))) % 1000 + first).reshape(shape)


def _state(*, is_filled: bool) -> dict[str, Any]:
    """A weight of HSDP, one sharded along TP, a norm that TP replicates, an embedding and a buffer without a mesh."""
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fsdp_tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    made: dict[str, Any] = {
        "weight": (WEIGHT, hsdp, [Replicate(), Shard(0)]),
        "norm": (NORM, fsdp_tp, [Shard(0), Replicate()]),
        "norm_of_all": (NORM, fsdp_tp, [Replicate(), Replicate()]),
        "embedding": (EMBEDDING, None, None),
        "buffer": (BUFFER, None, None),
    }
    state: dict[str, Any] = {"step": 7 if is_filled else 0}
    for n, (name, (shape, mesh, placements)) in enumerate(made.items()):
        whole = _values(shape, n) if is_filled else torch.zeros(shape)
        state[name] = whole if mesh is None else distribute_tensor(whole, mesh, placements)
    return state


def _save(_rank: int, url: str) -> None:
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        saver.save(_state(is_filled=True), step=1)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _load(rank: int, url: str, policy: LoadPolicy, change: Callable[[int, dict[str, Any]], None]) -> dict[str, int]:
    state, expected = _state(is_filled=False), _state(is_filled=True)
    change(rank, state)
    report = load(url, state, policy=policy)
    for name, value in expected.items():
        found = state[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(_whole(found).to(value.dtype), _whole(value)), name
        else:
            assert found == value
    return {
        "fetched": report.fetched_bytes,
        "received": report.received_bytes,
        "needed": report.needed_bytes,
        "unverified": report.unverified_bytes,
    }


def _as_it_is(rank: int, state: dict[str, Any]) -> None:
    pass


def test_each_byte_is_read_once_along_every_axis(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path))
    found = pool.run(_load, str(tmp_path), LoadPolicy(broadcast=True), _as_it_is)
    assert sum(each["fetched"] for each in found) == WHOLE_BYTES
    assert all(each["fetched"] + each["received"] == each["needed"] for each in found)
    assert max(each["fetched"] for each in found) < WHOLE_BYTES / 2
    assert sum(each["unverified"] for each in found) == 0


def _odd_destinations(rank: int, state: dict[str, Any]) -> None:
    """On some ranks another dtype, strides that are not row-major."""
    if rank == 1:
        state["embedding"] = torch.zeros(EMBEDDING, dtype=torch.float64)
    if rank == 2:
        state["embedding"] = torch.zeros(EMBEDDING[::-1]).T
    if rank == 3:
        state["buffer"] = torch.zeros(2 * BUFFER[0])[::2]


@pytest.mark.parametrize("lossy", ["error", "allow"])
def test_ranks_with_other_dtypes_and_layouts_get_it_too(pool: RankPool, tmp_path: Path, lossy: str) -> None:
    pool.run(_save, str(tmp_path))
    policy = LoadPolicy(broadcast=True, cast="allow", lossy_cast=lossy)
    found = pool.run(_load, str(tmp_path), policy, _odd_destinations)
    assert sum(each["fetched"] for each in found) == WHOLE_BYTES


def _own_names(rank: int, state: dict[str, Any]) -> None:
    """As with pipeline stages: ranks 0 and 1 have the embedding, ranks 2 and 3 the buffer."""
    state.pop("buffer" if rank < 2 else "embedding")


def _load_stages(rank: int, url: str) -> tuple[int, int]:
    state = _state(is_filled=False)
    _own_names(rank, state)
    report = load(url, state, policy=LoadPolicy(broadcast=True, extra="allow"))
    name, shape, first = ("embedding", EMBEDDING, 3) if rank < 2 else ("buffer", BUFFER, 4)
    assert torch.equal(state[name], _values(shape, first))
    return report.fetched_bytes, report.needed_bytes


def test_what_only_some_ranks_have_is_read_once_too(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path))
    found = pool.run(_load_stages, str(tmp_path))
    assert sum(fetched for fetched, _ in found) == WHOLE_BYTES


def _failing_load(rank: int, url: str, bad: int, fault: str) -> tuple[str, float]:
    """Load with a fault on rank `bad`: a disk that fails or hangs, a state that does not fit, another step."""
    state, let_go = _state(is_filled=False), threading.Event()
    policy = LoadPolicy(broadcast=True, timeout_s={"hang": HANG_S, "absent": 2.0}.get(fault, 60.0))
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "GRACE_S", 3.0)
        if rank == bad and fault == "contract":
            state["more"] = torch.zeros(2)
        if rank == bad and fault == "other step":
            url = f"{url}@1"
        if rank == bad and fault == "read":
            patch.setattr(FileStore, "read_into", _raise)
        if rank == bad and fault == "hang":
            patch.setattr(FileStore, "read_into", lambda *_: let_go.wait())
        try:
            if rank != bad or fault != "absent":
                load(url, state, policy=policy)
            text = ""
        except TitanError as error:
            text = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    let_go.set()
    dist.barrier()
    return text, took


def _raise(*_: Any) -> None:
    raise StoreError("a disk that fails")


@pytest.mark.parametrize("bad", [0, 2])
def test_a_rank_that_cannot_read_raises_on_all(pool: RankPool, tmp_path: Path, bad: int) -> None:
    pool.run(_save, str(tmp_path))
    answers = pool.run(_failing_load, str(tmp_path), bad, "read")
    for rank, (text, took) in enumerate(answers):
        assert text.startswith("StoreError: a disk" if rank == bad else "CheckpointError: some tensors are not loaded")
        assert rank == bad or f"since rank {bad} failed: StoreError: a disk that fails" in text
        assert took < MOST_S
    pool.run(_load, str(tmp_path), LoadPolicy(broadcast=True), _as_it_is)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_hung_read_ends_at_the_deadline_on_all_ranks(pool: RankPool, tmp_path: Path, bad: int) -> None:
    pool.run(_save, str(tmp_path))
    answers = pool.run(_failing_load, str(tmp_path), bad, "hang")
    for rank, (text, took) in enumerate(answers):
        assert f"the load did not end within {HANG_S:g} s (LoadPolicy(timeout_s=)); this rank was reading" in text
        assert ".distcp, bytes " in text
        assert rank == bad or f"rank {bad} failed: LoadTimeoutError" in text
        assert took < MOST_S
    pool.run(_load, str(tmp_path), LoadPolicy(broadcast=True), _as_it_is)


def _hung_alone(rank: int, url: str) -> str:
    """Without broadcast: rank 1's disk hangs, and the others share a mesh with it."""
    let_go = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(FileStore, "read_into", lambda *_: let_go.wait())
        try:
            load(url, _state(is_filled=False), policy=LoadPolicy(timeout_s=HANG_S))
            text = ""
        except TitanError as error:
            text = f"{type(error).__name__}: {error}"
    let_go.set()
    dist.barrier()
    return text


def test_without_broadcast_a_hung_read_ends_too(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path))
    answers = pool.run(_hung_alone, str(tmp_path))
    assert answers[1].startswith(f"LoadTimeoutError: the load did not end within {HANG_S:g} s (LoadPolicy(timeout_s=))")
    assert "may still write into the tensors of the state: end this process" in answers[1]
    for rank in (0, 2, 3):
        assert "since rank 1 failed: LoadTimeoutError: the load did not end" in answers[rank]


def test_a_rank_that_does_not_load_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path))
    answers = pool.run(_failing_load, str(tmp_path), 2, "absent")
    for rank, (text, took) in enumerate(answers):
        assert rank == 2 or "1 of 4 ranks have not begun to load" in text
        assert rank == 2 or "(rank 2)" in text
        assert took < MOST_S


def test_nothing_changes_if_a_state_does_not_fit(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save, str(tmp_path))
    answers = pool.run(_failing_load, str(tmp_path), 1, "contract")
    assert answers[1][0].startswith("LoadContractError")
    assert all("nothing was loaded, since rank 1 failed" in answers[rank][0] for rank in (0, 2, 3))


def _save_two(_rank: int, url: str) -> None:
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        for step in (1, 2):
            saver.save(_state(is_filled=True), step=step)


def test_ranks_that_open_different_steps_are_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_save_two, str(tmp_path))
    for text, _ in pool.run(_failing_load, str(tmp_path), 3, "other step"):
        assert "rank 0 opened" in text
        assert "@1, which is another checkpoint" in text


def _parts(rows: list[tuple[int, int, int, int]]) -> Parts:
    return np.array(rows, dtype=PART)


def test_shares_are_balanced_and_each_part_has_one_reader() -> None:
    random = np.random.default_rng(1)
    sizes = random.integers(1, 4 << 20, 400).tolist()
    holders = [sorted(random.choice(16, random.integers(1, 17), replace=False).tolist()) for _ in sizes]
    own: list[list[int]] = [[n for n, ranks in enumerate(holders) if rank in ranks] for rank in range(16)]
    shares = assign([_parts([(n % 5, n, n, sizes[n]) for n in items]) for items in own])
    read = [[own[rank][i] for batch in shares[rank] if batch.reader == rank for i in batch.items] for rank in range(16)]
    assert sorted(n for each in read for n in each) == [n for n, ranks in enumerate(holders) if len(ranks) > 1]
    for rank, batches in enumerate(shares):
        assert [batch.number for batch in batches] == sorted(batch.number for batch in batches)
        taken = sorted(own[rank][i] for batch in batches for i in batch.items)
        assert taken == [n for n in own[rank] if len(holders[n]) > 1]
    totals = [sum(sizes[n] for n in own[rank] if holders[n] == [rank] or n in read[rank]) for rank in range(16)]
    assert max(totals) - min(totals) < max(sizes) + (8 << 20)


def test_small_neighbours_of_a_file_are_read_together() -> None:
    rows = [(0, 1000 * n, n, 1000) for n in range(300)]
    shares = assign([_parts(rows)] * 4)
    assert len(shares[0]) == 5
    assert {batch.reader for batch in shares[0]} == {0, 1, 2, 3}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 13, 64])
def test_a_tree_reaches_each_holder_once(count: int) -> None:
    holders = tuple(range(10, 10 + 3 * count, 3))
    for reader in (holders[0], holders[-1]):
        links = {rank: neighbours(holders, reader, rank) for rank in holders}
        assert sorted(to for _, tos in links.values() for to in tos) == sorted(set(holders) - {reader})
        assert all(links[to][0] == rank for rank, (_, tos) in links.items() for to in tos)
        assert len(links[reader][1]) <= (count - 1).bit_length()
