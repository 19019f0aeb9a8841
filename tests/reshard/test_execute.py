"""The executor against numpy: any chunks into any target boxes, within any memory budget, byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_ckpt.errors import DamagedError, PlanError, UsageError
from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.resharding.reshard import DEFAULT_MEMORY
from titan_ckpt.rewrite.execute import Execution, FileResult
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.rewrite.plan import FileGroup, Literal, Region, RewriteSource, SourceTensor, TargetFile, Transform
from titan_ckpt.sharding.box_columns import shard_columns
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Box, Placements, Shape, Shard
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store

ITEM = {"float32": np.uint32, "bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "int64": np.uint64}


def bits(shape: Shape, dtype: str, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng(seed)
        .integers(0, 256, (*shape, ELEMENT_SIZE[dtype]), dtype=np.uint8)
        .view(ITEM[dtype])[..., 0]
    )


def take(array: np.ndarray, box: Box) -> bytes:
    return array[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].tobytes()


def store_chunks(
    store: FileStore, name: str, array: np.ndarray, dtype: str, offsets: Int64s, sizes: Int64s
) -> RewriteSource:
    """One object per chunk, the payload at byte 7."""
    boxes = [Box(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)]
    payloads = [take(array, box) for box in boxes]
    for index, payload in enumerate(payloads):
        store.write(f"{name}.{index}", [b"x" * 7, payload, b"tail"])
    count = len(boxes)
    tensor = SourceTensor(
        dtype=dtype, global_shape=array.shape, box_offsets=offsets, box_sizes=sizes, object=np.arange(count),
        start=np.full(count, 7), length=np.array([len(p) for p in payloads]), codec=np.zeros(count, dtype=np.int64),
        digests=b"".join(xxhash.xxh3_128_digest(p) for p in payloads),
    )  # fmt: skip
    return RewriteSource(objects=tuple(f"{name}.{i}" for i in range(count)), tensors={name: tensor})


def run(
    source: RewriteSource, store: FileStore, groups: list[FileGroup], *, buffer_bytes: int = 4096, check: bool = True
) -> list[FileResult]:
    execution = Execution(
        source=source, source_store=store, target_store=store, is_checked=check,
        budget=Budget(buffer_bytes=buffer_bytes, buffers_per_pool=2, max_open_files=3),
    )  # fmt: skip
    return [result for results in execution.run(groups) for result in results]


def target(name: str, index: int, box: Box, transform: Transform | None = None) -> TargetFile:
    region = Region(tensor=name, box=box, key="k", transform=transform)
    return TargetFile(path=f"out/{index}", segments=(Literal(b"head"), region, Literal(b"foot")))


MESHES = st.sampled_from(["1", "dp_shard=2", "dp_shard=3", "dp_shard=4", "tp=2", "dp_shard=2,tp=2", "dp_shard=3,tp=2"])


@st.composite
def placements_of(draw: st.DrawFn, ndim: int) -> Placements:
    if ndim == 0:
        return {}
    axes = draw(st.lists(st.sampled_from(["tp", "dp_shard"]), unique=True, max_size=2))
    return {axis: Shard(draw(st.integers(0, ndim - 1))) for axis in axes}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, str, str, Placements, str, Placements, int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    dtype = draw(st.sampled_from(sorted(ITEM)))
    ndim = len(shape)
    return (
        shape, dtype, draw(MESHES), draw(placements_of(ndim)), draw(MESHES), draw(placements_of(ndim)),
        draw(st.sampled_from([64, 300, 4096])), draw(st.integers(1, 3)),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_any_cut_becomes_any_other_cut(tmp_path_factory: pytest.TempPathFactory, case: tuple) -> None:  # type: ignore[type-arg]
    shape, dtype, mesh_a, placements_a, mesh_b, placements_b, buffer_bytes, files_per_group = case
    store = FileStore(str(tmp_path_factory.mktemp("case")))
    array = bits(shape, dtype)
    a, b = (
        shard_columns(shape, placements_a, MeshSpec.parse(mesh_a)),
        shard_columns(shape, placements_b, MeshSpec.parse(mesh_b)),
    )
    source = store_chunks(store, "t", array, dtype, a.offsets, a.sizes)
    boxes = [Box(tuple(o), tuple(s)) for o, s in zip(b.offsets.tolist(), b.sizes.tolist(), strict=True)]
    files = [target("t", index, box) for index, box in enumerate(boxes)]
    groups = [FileGroup(files=tuple(files[i : i + files_per_group])) for i in range(0, len(files), files_per_group)]
    results = run(source, store, groups, buffer_bytes=buffer_bytes)
    assert [result.path for result in results] == [file.path for file in files]
    for result, box in zip(results, boxes, strict=True):
        payload = take(array, box)
        assert store.read(result.path) == b"head" + payload + b"foot"
        assert result.digests == {"k": xxhash.xxh3_128_digest(payload)}
        assert result.digest == xxhash.xxh3_128_digest(b"head" + payload + b"foot")


def test_a_column_cut_in_one_wave_reads_each_source_byte_once(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    array = bits((64, 48), "float32")
    rows = shard_columns((64, 48), {"dp_shard": Shard(0)}, MeshSpec.parse("dp_shard=4"))
    columns = shard_columns((64, 48), {"tp": Shard(1)}, MeshSpec.parse("tp=3"))
    source = store_chunks(store, "t", array, "float32", rows.offsets, rows.sizes)
    files = [target("t", i, Box(tuple(columns.offsets[i]), tuple(columns.sizes[i]))) for i in range(3)]
    execution = Execution(
        source=source, source_store=store, target_store=store,
        budget=Budget(buffer_bytes=2048, buffers_per_pool=2, max_open_files=3),
    )  # fmt: skip
    list(execution.run([FileGroup(files=tuple(files))]))
    assert execution.traffic.read_bytes == array.nbytes


def test_a_transform_gets_whole_row_groups_and_is_cropped(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    array = bits((24, 5), "bfloat16")
    chunks = shard_columns((24, 5), {"dp_shard": Shard(0)}, MeshSpec.parse("dp_shard=5"))
    source = store_chunks(store, "t", array, "bfloat16", chunks.offsets, chunks.sizes)
    expected = array.reshape(6, 4, 5)[:, ::-1].reshape(24, 5)

    def reverse_groups(raw: memoryview, box: Box) -> memoryview:
        assert (box.offsets[0] % 4, box.sizes[0] % 4) == (0, 0)
        rows = np.frombuffer(raw, dtype=np.uint16).reshape(-1, 4, 5)
        return np.ascontiguousarray(rows[:, ::-1]).data

    transform = Transform(dtype="bfloat16", apply=reverse_groups, row_multiple=4)
    boxes = [Box((0, 0), (7, 5)), Box((7, 0), (2, 5)), Box((9, 0), (15, 5))]
    files = [target("t", index, box, transform) for index, box in enumerate(boxes)]
    run(source, store, [FileGroup(files=tuple(files))], buffer_bytes=256)
    for index, box in enumerate(boxes):
        assert store.read(f"out/{index}")[4:-4] == take(expected, box)


def test_a_flipped_source_bit_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    array = bits((8, 8), "float32")
    chunks = shard_columns((8, 8), {"dp_shard": Shard(0)}, MeshSpec.parse("dp_shard=2"))
    source = store_chunks(store, "t", array, "float32", chunks.offsets, chunks.sizes)
    data = bytearray(store.read("t.1"))
    data[20] ^= 1
    store.write("t.1", [data])
    groups = [FileGroup(files=(target("t", 0, Box((0, 0), (8, 3))),))]
    with pytest.raises(DamagedError, match=r"t\.1: t: the 128 bytes at 7 have digest"):
        run(source, store, groups)
    assert not store.exists("out/0")
    assert len(run(source, store, groups, check=False)) == 1


def test_a_source_with_a_hole_is_refused(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path))
    array = bits((8, 2), "float32")
    chunks = shard_columns((8, 2), {"dp_shard": Shard(0)}, MeshSpec.parse("dp_shard=2"))
    source = store_chunks(store, "t", array, "float32", chunks.offsets[:1], chunks.sizes[:1])
    with pytest.raises(PlanError, match="no chunk for all of"):
        run(source, store, [FileGroup(files=(target("t", 0, Box((0, 0), (8, 2))),))])


@pytest.mark.s3
def test_eight_tp_files_are_open_at_once_on_s3_in_the_budget(
    s3_environment: dict[str, str],
) -> None:
    assert s3_environment
    store = open_store("s3://titan-tests/budget")
    budget = Budget.of(DEFAULT_MEMORY, store, store)
    assert budget.max_open_files >= 8
    assert budget.total_bytes(store, budget.max_open_files) <= DEFAULT_MEMORY
    with pytest.raises(UsageError, match=r"is too little for s3://titan-tests/budget"):
        Budget.of(64 << 20, store, store)
