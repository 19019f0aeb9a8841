"""What the ranks wrote of a plan of DCP's, as the entries and the chunk table of our manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from titan_ckpt.errors import CheckpointError
from titan_ckpt.format.manifest import DIGEST_BYTES, ChunkTable, ObjectEntry, TensorEntry
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.sharding.placement import Shard
from titan_ckpt.state.local_shard import LocalShard

Paths = Mapping[str, Sequence[str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A tensor or a value of a rank's file: row `row` of the tensors of `part`, or, without a `shard`, the value `name`.

    `below` are the keys that lead to it from the place of DCP's item in the state.
    """

    part: RankPart
    name: str
    row: int = -1
    shard: LocalShard | None = None
    below: tuple[str | int, ...] = ()

    @property
    def digest(self) -> bytes:
        """Of a tensor's bytes."""
        return self.part.digests[self.row * DIGEST_BYTES :][:DIGEST_BYTES]


def result_of(item: WriteItem, written: Written) -> WriteResult:
    """What DCP sends to the coordinator about one thing that was stored of an item."""
    size_bytes = int(written.part.columns[written.row][2]) if written.shard is not None else 0
    return WriteResult(index=item.index, size_in_bytes=size_bytes, storage_data=written)


def tensors_of(written: Iterable[Written]) -> list[tuple[TensorEntry, list[Written]]]:
    """Each tensor with what was written of it, by name. CheckpointError if two ranks wrote other bytes for the same part of one.

    Ranks that hold different shards of a wrapper subclass may hold equal copies of an inner tensor: one copy counts.
    """
    chunks: dict[str, dict[tuple[int, ...], Written]] = {}
    for each in written:
        if each.shard is None:
            continue
        first = chunks.setdefault(each.name, {}).setdefault(each.shard.offsets, each)
        if first.digest != each.digest:
            raise CheckpointError(
                f"{each.name}: two ranks hold other values at {each.shard.offsets} of it, and one would be stored: the ranks "
                "have drifted apart"
            )
    found: list[tuple[TensorEntry, list[Written]]] = []
    count = 0
    for name in sorted(chunks):
        parts = [chunks[name][offsets] for offsets in sorted(chunks[name])]
        found.append((_entry_of(parts, first_chunk=count), parts))
        count += len(parts)
    return found


def _entry_of(chunks: Sequence[Written], *, first_chunk: int) -> TensorEntry:
    shard = chunks[0].shard
    assert shard is not None
    is_whole = len(chunks) == 1 and shard.placements is None
    return TensorEntry(
        fqn=shard.fqn,
        dtype=shard.dtype,
        global_shape=shard.global_shape,
        placements={} if is_whole else _by_axis(shard),
        stages=None,
        first_chunk=first_chunk,
        num_chunks=len(chunks),
    )


def _by_axis(shard: LocalShard) -> dict[str, Shard] | None:
    return None if shard.placements is None else {axis: Shard(dim) for axis, dim in shard.placements}


def objects_of(parts: Iterable[RankPart]) -> tuple[ObjectEntry, ...]:
    """The values by name. CheckpointError if two ranks wrote other bytes for one."""
    found: dict[str, ObjectEntry] = {}
    for part in parts:
        for o in part.objects:
            entry = ObjectEntry(fqn=o.fqn, file=part.files[0].path, offset=o.offset, length=o.length, digest=o.digest)
            if found.setdefault(o.fqn, entry).digest != o.digest:
                raise CheckpointError(
                    f"{o.fqn}: two ranks hold tensors of other settings, and one of them would be stored"
                )
    return tuple(found[name] for name in sorted(found))


def table_of(rows: Sequence[Written], number: Mapping[str, int]) -> ChunkTable:
    """The chunk table of `rows`; `number` is the index of each file by its path."""
    boxes = [row.shard.box for row in rows if row.shard is not None]
    columns = np.array([row.part.columns[row.row] for row in rows], dtype=np.int64).reshape(-1, 6).T
    return ChunkTable(
        file=np.array([number[row.part.files[0].path] for row in rows], dtype=np.int64),
        offset=columns[1],
        length=columns[2],
        payload_offset=columns[3],
        payload_length=columns[4],
        codec=columns[5],
        box_offsets=np.array([n for box in boxes for n in box.offsets], dtype=np.int64),
        box_sizes=np.array([n for box in boxes for n in box.sizes], dtype=np.int64),
        digests=b"".join(row.digest for row in rows),
    )


def paths_of(planned: Paths, written: Iterable[tuple[str, Written]]) -> dict[str, Sequence[str | int]]:
    """DCP's paths, where an entry that is stored in pieces has theirs; `written` are pairs of an entry and a piece."""
    below: dict[str, dict[str, Sequence[str | int]]] = {}
    for entry, each in written:
        if each.below and entry in planned:
            below.setdefault(entry, {})[each.name] = (*planned[entry], *each.below)
    found: dict[str, Sequence[str | int]] = {}
    for name, path in planned.items():
        found |= below.get(name, {name: path})
    return found
