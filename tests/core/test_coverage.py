"""Chunks tile their tensors: the proof, and every path that refuses to use a byte without it."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import titan_ckpt
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.errors import CheckpointError, DamagedError, TitanError
from titan_ckpt.format.commit import _encode, commit_path, write_commit
from titan_ckpt.format.coverage import coverage_problems
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest_json import decode_manifest
from titan_ckpt.resharding.placement_rules import read_rules
from titan_ckpt.saving.writers import divide
from titan_ckpt.sharding.tiling import MAX_CORNERS, Flaw, TooIrregularError, find_flaws
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.local import FileStore

STEP = "step-00000001"
Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def flaws(shape: tuple[int, ...], boxes: Boxes) -> Flaw | None:
    offsets, sizes = (np.array([b[n] for b in boxes], dtype=np.int64).reshape(len(boxes), len(shape)) for n in (0, 1))
    return find_flaws([shape], np.zeros(len(boxes), dtype=np.int64), offsets, sizes).get(0)


def counted(shape: tuple[int, ...], boxes: Boxes) -> Flaw | None:
    """The same by counting the boxes that hold each element."""
    for offsets, sizes in boxes:
        if any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return Flaw(offsets, -1)
    count = np.zeros(shape, dtype=np.int64)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    wrong = np.argwhere(count != 1).tolist()
    return Flaw(tuple(wrong[0]), int(count[tuple(wrong[0])])) if wrong else None


def cut(shape: tuple[int, ...], times: int, rng: random.Random) -> Boxes:
    """A tiling by random cuts across random boxes."""
    boxes: Boxes = [((0,) * len(shape), shape)]
    for _ in range(times):
        index, dim = rng.randrange(len(boxes)), rng.randrange(len(shape))
        offsets, sizes = (list(part) for part in boxes[index])
        at = rng.randint(0, sizes[dim])
        boxes[index] = (tuple(offsets), (*sizes[:dim], at, *sizes[dim + 1 :]))
        offsets[dim], sizes[dim] = offsets[dim] + at, sizes[dim] - at
        boxes.append((tuple(offsets), tuple(sizes)))
    rng.shuffle(boxes)
    return boxes


@given(st.integers(0, 10**9), st.lists(st.integers(0, 6), max_size=4), st.integers(0, 8), st.integers(0, 2))
def test_the_proof_agrees_with_counting_every_element(seed: int, sizes: list[int], times: int, changes: int) -> None:
    rng, shape = random.Random(seed), tuple(sizes)
    boxes = cut(shape, times if shape else 0, rng)
    for _ in range(changes):
        what, index = rng.choice(["drop", "repeat", "move", "grow"]), rng.randrange(len(boxes))
        offsets, lengths = boxes[index]
        if what == "drop" and len(boxes) > 1:
            boxes.pop(index)
        elif what == "repeat":
            boxes.append(boxes[index])
        elif shape:
            dim, by = rng.randrange(len(shape)), rng.choice([-1, 1])
            old = list(offsets if what == "move" else lengths)
            old[dim] += by
            boxes[index] = (tuple(old), lengths) if what == "move" else (offsets, tuple(old))
    assert flaws(shape, boxes) == counted(shape, boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "expected"),
    [
        ((4, 4), [((0, 0), (2, 4)), ((0, 0), (2, 4))], Flaw((0, 0), 2)),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 3)), ((0, 0), (1, 2))], Flaw((0, 0), 2)),
        ((4, 4), [((0, 0), (4, 3)), ((1, 3), (3, 1))], Flaw((0, 3), 0)),
        ((6,), [((0,), (4,)), ((3,), (2,))], Flaw((3,), 2)),
        ((), [], Flaw((), 0)),
        ((), [((), ()), ((), ())], Flaw((), 2)),
        ((0, 3), [], None),
        ((0, 3), [((0, 0), (0, 3)), ((0, 1), (0, 2))], None),
        ((2,), [((0,), (2,)), ((2,), (0,)), ((1,), (0,))], None),
        ((2,), [((0,), (2,)), ((3,), (0,))], Flaw((3,), -1)),
        ((2,), [((2**62,), (2**62,)), ((0,), (2,))], Flaw((2**62,), -1)),
    ],
)
def test_gaps_and_overlaps_are_found_where_they_begin(
    shape: tuple[int, ...], boxes: Boxes, expected: Flaw | None
) -> None:
    assert flaws(shape, boxes) == expected


def test_a_hundred_thousand_chunks_are_proved_one_by_one() -> None:
    grid = list(product(range(300), range(340)))
    boxes: Boxes = [((2 * i, 3 * j), (2, 3)) for i, j in grid]
    assert flaws((600, 1020), boxes) is None
    boxes[51_234] = ((2 * grid[51_233][0], 3 * grid[51_233][1]), (2, 3))
    assert flaws((600, 1020), boxes) == Flaw((2 * grid[51_233][0], 3 * grid[51_233][1]), 2)


def test_boxes_that_no_cut_makes_are_refused_not_counted() -> None:
    rng = random.Random(0)
    boxes: Boxes = [(tuple(rng.choices(range(200), k=12)), tuple(rng.choices(range(1, 50), k=12))) for _ in range(9000)]
    with pytest.raises(TooIrregularError, match=str(MAX_CORNERS)):
        flaws((256,) * 12, boxes)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run whose tensor `model.w` (8, 4) is stored in four chunks of two rows."""
    state = {"model": {"w": torch.arange(32.0).reshape(8, 4), "scalar": torch.tensor(3.0)}, "step": 1}
    titan_ckpt.save(f"{tmp_path}/whole", state, step=1, options=titan_ckpt.SaveOptions(mesh=titan_ckpt.MeshSpec()))
    plan = titan_ckpt.plan_reshard(
        open_checkpoint(f"{tmp_path}/whole"), titan_ckpt.MeshSpec.parse("dp_shard=4"), rules=_rows()
    )
    titan_ckpt.run_plan(plan, f"{tmp_path}/run")
    return f"{tmp_path}/run"


def _rows() -> Any:
    return read_rules('[placements]\n"model.w" = ["dp_shard:0"]\n', where="rules")


def doctor(run: str, change: Callable[[list[int], list[int]], None]) -> None:
    """Change the boxes of `model.w` in the manifest, offsets and sizes row by row, and commit the forgery."""
    store = FileStore(run)
    commit = json.loads(store.read(commit_path(1)))
    path = f"{STEP}/{commit['attempt']}/manifest.json"
    manifest = json.loads(store.read(path))
    change(manifest["chunks"]["box_offsets"], manifest["chunks"]["box_sizes"])
    data = json.dumps(manifest, separators=(",", ":")).encode()
    store.write(path, [data])
    commit["manifest"] = {"size": len(data), "xxh3_128": digest(data).hex()}
    store.write(commit_path(1), [_encode({key: value for key, value in commit.items() if key != "xxh3_128"})])


def overlap_and_gap(offsets: list[int], _sizes: list[int]) -> None:
    """The second chunk over the first: the sum of elements stays right."""
    assert offsets == [0, 0, 2, 0, 4, 0, 6, 0], offsets
    offsets[2] = 0


def outside(offsets: list[int], _sizes: list[int]) -> None:
    offsets[6] = 7


def negative(offsets: list[int], _sizes: list[int]) -> None:
    offsets[2] = -2


def short(_offsets: list[int], sizes: list[int]) -> None:
    sizes[1] = 3


def partly_over(offsets: list[int], _sizes: list[int]) -> None:
    offsets[4] = 3


def _dcp(run: str) -> None:
    dcp.load({"model": {"w": torch.zeros(8, 4)}}, storage_reader=titan_ckpt.StorageReader(f"{run}@1"), no_dist=True)


READERS: dict[str, Callable[[str], object]] = {
    "load": lambda run: titan_ckpt.load(f"{run}@1", {"model": {"w": torch.zeros(8, 4), "scalar": torch.zeros(())}}),
    "read": lambda run: open_checkpoint(f"{run}@1").read("model.w"),
    "reshard": lambda run: titan_ckpt.plan_reshard(open_checkpoint(f"{run}@1"), titan_ckpt.MeshSpec()),
    "diff": lambda run: titan_ckpt.diff(open_checkpoint(f"{run}@1"), open_checkpoint(f"{run}/../whole@1")),
    "dcp": _dcp,
}


@pytest.mark.parametrize("change", [overlap_and_gap, outside, negative, short, partly_over])
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_uses_chunks_that_do_not_tile(run: str, reader: str, change: Callable[..., None]) -> None:
    READERS[reader](run)
    doctor(run, change)
    with pytest.raises((DamagedError, dcp.api.CheckpointException), match=r"model\.w|negative number"):
        READERS[reader](run)


@pytest.mark.parametrize("command", ["convert to-torch", "convert to-hf", "cp", "reshard"])
def test_no_command_copies_chunks_that_do_not_tile(
    run: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(run, overlap_and_gap)
    target = tmp_path / "target"
    arguments = [*command.split(), f"{run}@1", f"{target}", *(["--mesh", "1"] if command == "reshard" else [])]
    assert main(arguments) == 3
    assert "model.w" in capsys.readouterr().err
    assert not target.exists() or not list(target.rglob("*.*"))


def test_verify_names_the_tensor_and_the_element(run: str) -> None:
    doctor(run, overlap_and_gap)
    (problem,) = verify(run)
    assert problem.fqn == "model.w"
    assert "element [0, 0] is in 2 chunks" in problem.message
    assert "4 chunks hold 32 of 32" in problem.message


def test_a_load_of_untiled_chunks_changes_no_tensor(run: str) -> None:
    checkpoint = open_checkpoint(run)
    manifest = checkpoint.manifest
    moved = np.array(manifest.chunks.box_offsets)
    moved[2] = 0
    forged = titan_ckpt.Checkpoint(
        store=checkpoint.store, url=run, step=1, folder=checkpoint.folder, manifest=_with_offsets(manifest, moved)
    )
    state: dict[str, Any] = {"model": {"w": torch.full((8, 4), 7.0), "scalar": torch.zeros(())}, "step": 0}
    with pytest.raises(DamagedError, match=r"model\.w"):
        titan_ckpt.load(forged, state)
    assert torch.equal(state["model"]["w"], torch.full((8, 4), 7.0))
    assert state["step"] == 0


def _with_offsets(manifest: Any, offsets: Any) -> Any:
    return replace(manifest, chunks=replace(manifest.chunks, box_offsets=offsets))


def test_a_newest_step_whose_chunks_do_not_tile_is_passed_over(run: str) -> None:
    whole = open_checkpoint(f"{run}/../whole")
    titan_ckpt.save(run, {"model": {"w": whole.read("model.w"), "scalar": torch.tensor(3.0)}, "step": 0}, step=0)
    doctor(run, overlap_and_gap)
    assert open_checkpoint(run).step == 0


def test_a_commit_of_untiled_chunks_is_never_written(run: str, tmp_path: Path) -> None:
    manifest = open_checkpoint(run).manifest
    moved = np.array(manifest.chunks.box_offsets)
    moved[2] = 0
    with pytest.raises(CheckpointError, match=r"model\.w"):
        write_commit(FileStore(str(tmp_path / "new")), _with_offsets(manifest, moved), b"", replaces=None)
    assert not (tmp_path / "new").exists()


def test_a_raw_payload_of_another_size_is_refused(run: str) -> None:
    path = next(Path(run).glob("step-*/a-*/manifest.json"))
    content = json.loads(path.read_text())
    content["chunks"]["payload_length"][1] += 4
    found = coverage_problems(decode_manifest(json.dumps(content).encode(), where="m"))
    assert found == {"model.w": "a chunk's payload has not the size of its box in float32"}


def _foreign(run: str, change: Callable[[Any], Any]) -> Any:
    """A plain DCP index with the chunks of `model.w` changed."""
    manifest = open_checkpoint(run).manifest
    sizes = {file.path: file.size_bytes for file in manifest.files}
    return read_dcp_metadata(dcp_metadata(change(manifest)), sizes=sizes, step=1, where="x")


def test_a_foreign_box_that_is_listed_twice_is_one_chunk(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(6.0)}, checkpoint_id=tmp_path / "plain", no_dist=True)
    metadata = FileSystemReader(tmp_path / "plain").read_metadata()
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.append(entry.chunks[0])
    (tmp_path / "plain" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(open_checkpoint(str(tmp_path / "plain")).read("w"), torch.arange(6.0))


def test_foreign_chunks_that_do_not_tile_are_refused(run: str) -> None:
    def moved(manifest: Any) -> Any:
        offsets = np.array(manifest.chunks.box_offsets)
        offsets[4] = 3
        return _with_offsets(manifest, offsets)

    manifest = _foreign(run, moved)
    checkpoint = Checkpoint(store=FileStore(run), url=run, step=1, folder=STEP, manifest=manifest)
    with pytest.raises(DamagedError, match=r"model\.w: element \[3, 0\] is in 2 chunks"):
        checkpoint.read("model.w")


def test_ranks_whose_shards_overlap_by_the_hundred_cannot_save() -> None:
    """65 boxes and more were once summed only."""

    def shard(start: int, rows: int) -> LocalShard:
        return LocalShard(
            fqn="w", dtype="float32", global_shape=(200, 2), placements=None, offsets=(start, 0), sizes=(rows, 2)
        )

    held = [[shard(2 * rank, 2)] for rank in range(100)]
    assert len(divide(held, [[]] * 100, None).rows) == 100
    held[70] = [shard(141, 2)]
    with pytest.raises(TitanError, match=r"w: element \[140, 0\] is in no chunk"):
        divide(held, [[]] * 100, None)
