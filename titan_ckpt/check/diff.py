"""Compare two checkpoints, on any meshes, without torch.

Names, shapes, dtypes and placements come from the manifests. If both shard a tensor alike, comparing digests decides whether its
bytes are equal without reading them. `values` reads the remaining tensors block by block and measures the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from titan_ckpt.arguments import check_flag, check_number
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import Choice
from titan_ckpt.checkpoint.open import as_checkpoint
from titan_ckpt.checkpoint.read import read_box
from titan_ckpt.errors import UsageError
from titan_ckpt.format.dtypes import Array, decode
from titan_ckpt.format.manifest import DIGEST_BYTES, TensorEntry
from titan_ckpt.location import StrPath
from titan_ckpt.sharding.placement import Box, Placements, format_placements
from titan_ckpt.store.clients.options import Options, using

BLOCK_ELEMENTS = 4 << 20


class DifferenceKind(Choice):
    """What differs: a tensor's presence, shape, dtype or content, a value, the training state, or the layout."""

    ONLY_A = "only_a"
    ONLY_B = "only_b"
    SHAPE = "shape"
    DTYPE = "dtype"
    BYTES = "bytes"
    VALUES = "values"
    OBJECT = "object"
    TRAINING = "training"
    MESH = "mesh"
    PLACEMENT = "placement"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference. `kind`: only_a, only_b, shape, dtype, bytes, values, object, training, mesh or placement.

    mesh and placement are about the layout, not the content: see `is_layout`. `max_abs` and `max_rel` (relative to the larger of
    the two) are over all elements; `num_different` counts those outside the tolerance.
    """

    fqn: str
    kind: DifferenceKind
    a: str = ""
    b: str = ""
    max_abs: float | None = None
    max_rel: float | None = None
    num_different: int | None = None

    @property
    def is_layout(self) -> bool:
        """Whether only the layout of the same content differs."""
        return self.kind in (DifferenceKind.MESH, DifferenceKind.PLACEMENT)


@dataclass(slots=True)
class Comparison:
    """`equal` and `unknown` are tensor names; unknown ones are sharded differently, so that only `values` can compare them."""

    differences: list[Difference] = field(default_factory=list)
    equal: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def diff(
    a: Checkpoint | StrPath, b: Checkpoint | StrPath, *, values: bool = False, rtol: float = 0.0,
    storage_options: Options = None,
) -> list[Difference]:  # fmt: skip
    """The differences of two checkpoints (open, or as `URL[@STEP]`) on any meshes, tensors first; empty if there are none.

    Tensors that both shard alike are compared by digest. `values` reads the elements of the others, which may differ by `rtol`
    times the larger of the two; two NaN are equal. UsageError for an `rtol` below 0, or without `values`.
    """
    with using(storage_options, a, b):
        return compare(as_checkpoint(a), as_checkpoint(b), values=values, rtol=rtol).differences


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    values: bool = False,
    rtol: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare everything. With `values`, elements may differ by `rtol` times the larger; two NaN are equal."""
    check_flag(values, "values")
    check_number(rtol, "rtol", at_least=0)
    if rtol and not values:
        raise UsageError(f"rtol is {rtol} without values=True: only digests would be compared")
    a.prove_coverage()
    b.prove_coverage()
    result = Comparison()
    for fqn in sorted({*a.manifest.by_fqn, *b.manifest.by_fqn}):
        left, right = a.manifest.by_fqn.get(fqn), b.manifest.by_fqn.get(fqn)
        if left is None or right is None:
            result.differences.append(_only(fqn, left, right))
        else:
            _compare_tensor(_Stored(a, left), _Stored(b, right), result, values, rtol, on_bytes or (lambda _: None))
    result.differences += _compare_objects(a, b)
    result.differences += _compare_state(a, b)
    return result


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor and its checkpoint."""

    checkpoint: Checkpoint
    tensor: TensorEntry


def _only(fqn: str, left: TensorEntry | None, right: TensorEntry | None) -> Difference:
    text = [f"{t.dtype} {t.global_shape}" if t else "-" for t in (left, right)]
    return Difference(
        fqn=fqn, kind=DifferenceKind.ONLY_B if left is None else DifferenceKind.ONLY_A, a=text[0], b=text[1]
    )


def _compare_tensor(
    a: _Stored, b: _Stored, result: Comparison, values: bool, rtol: float, on_bytes: Callable[[int], None]
) -> None:
    fqn, left, right = a.tensor.fqn, a.tensor, b.tensor
    cuts = _cuts(a), _cuts(b)
    if None not in cuts and cuts[0] != cuts[1]:
        texts = [format_placements(placements or {}) for placements in cuts]
        result.differences.append(Difference(fqn=fqn, kind=DifferenceKind.PLACEMENT, a=texts[0], b=texts[1]))
    if left.global_shape != right.global_shape:
        shapes = str(left.global_shape), str(right.global_shape)
        result.differences.append(Difference(fqn=fqn, kind=DifferenceKind.SHAPE, a=shapes[0], b=shapes[1]))
        return
    if left.dtype != right.dtype:
        result.differences.append(Difference(fqn=fqn, kind=DifferenceKind.DTYPE, a=left.dtype, b=right.dtype))
    is_same = _by_digest(a, b)
    if is_same:
        result.equal.append(fqn)
    elif values:
        found = _compare_values(a, b, rtol, on_bytes)
        if found is None:
            result.equal.append(fqn)
        else:
            result.differences.append(found)
    elif is_same is None:
        result.unknown.append(fqn)
    else:
        result.differences.append(Difference(fqn=fqn, kind=DifferenceKind.BYTES, a="digest", b="differs"))


def _cuts(stored: _Stored) -> Placements | None:
    """A tensor's placements without the axes of degree 1, which shard nothing."""
    placements, mesh = stored.tensor.placements, stored.checkpoint.manifest.mesh
    if placements is None or mesh is None:
        return placements
    return {axis: shard for axis, shard in placements.items() if mesh.degree(axis) > 1}


def _by_digest(a: _Stored, b: _Stored) -> bool | None:
    """Whether the bytes are equal; None if the digests cannot decide it."""
    digests = a.checkpoint.digests, b.checkpoint.digests
    if digests[0] is None or digests[1] is None or a.tensor.dtype != b.tensor.dtype:
        return None
    tables = [_digest_by_box(stored, table) for stored, table in zip((a, b), digests, strict=True) if table is not None]
    return tables[0] == tables[1] if tables[0].keys() == tables[1].keys() else None


def _digest_by_box(stored: _Stored, digests: bytes) -> dict[tuple[int, ...], bytes]:
    offsets, sizes = stored.checkpoint.manifest.boxes(stored.tensor)
    first = stored.tensor.first_chunk
    places = np.concatenate([offsets, sizes], axis=1).tolist()
    return {
        tuple(place): digests[(first + n) * DIGEST_BYTES : (first + n + 1) * DIGEST_BYTES]
        for n, place in enumerate(places)
        if 0 not in place[len(place) // 2 :]
    }


def _compare_values(a: _Stored, b: _Stored, rtol: float, on_bytes: Callable[[int], None]) -> Difference | None:
    max_abs = max_rel = 0.0
    num_different = 0
    for box in _blocks(a.tensor.global_shape):
        left, right = read_box(a.checkpoint, a.tensor, box), read_box(b.checkpoint, b.tensor, box)
        on_bytes(left.nbytes + right.nbytes)
        if a.tensor.dtype == b.tensor.dtype and left.tobytes() == right.tobytes():
            continue
        absolute, relative = _errors(decode(left, a.tensor.dtype), decode(right, b.tensor.dtype))
        max_abs, max_rel = max(max_abs, float(absolute.max())), max(max_rel, float(relative.max()))
        num_different += int(np.count_nonzero(relative > rtol))
    if num_different == 0:
        return None
    return Difference(
        fqn=a.tensor.fqn, kind=DifferenceKind.VALUES, a=a.tensor.dtype, b=b.tensor.dtype, max_abs=max_abs, max_rel=max_rel,
        num_different=num_different,
    )  # fmt: skip


def _errors(left: Array, right: Array) -> tuple[Array, Array]:
    """(absolute, relative) errors; infinite where only one is NaN or infinities differ."""
    if left.dtype.kind in "iu" or right.dtype.kind in "iu":
        is_equal = left == right
        # Subtraction as float64 may round for int64, so equality is decided on the integers themselves.
        left, right = left.astype(np.float64), right.astype(np.float64)
    else:
        is_equal = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        absolute = np.where(is_equal, 0.0, np.abs(left - right))
        relative = np.where(is_equal, 0.0, absolute / np.maximum(np.abs(left), np.abs(right)))
    smallest = np.finfo(np.float64).tiny
    absolute = np.where(np.isnan(absolute), math.inf, np.where(is_equal, 0.0, np.maximum(absolute, smallest)))
    relative = np.where(np.isnan(relative), math.inf, np.where(is_equal, 0.0, np.maximum(relative, smallest)))
    return absolute, relative


def _blocks(global_shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of whole rows: at most `BLOCK_ELEMENTS` elements, or one row if it is larger."""
    if 0 in global_shape:
        return
    if not global_shape:
        yield Box((), ())
        return
    row = math.prod(global_shape[1:])
    step = max(1, BLOCK_ELEMENTS // row)
    for start in range(0, global_shape[0], step):
        rows = min(step, global_shape[0] - start)
        yield Box((start, *(0 for _ in global_shape[1:])), (rows, *global_shape[1:]))


def _compare_objects(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    left, right = a.manifest.objects_by_fqn, b.manifest.objects_by_fqn
    for fqn in sorted({*left, *right}):
        if fqn not in left or fqn not in right:
            yield Difference(
                fqn=fqn, kind=DifferenceKind.ONLY_B if fqn not in left else DifferenceKind.ONLY_A, a="value", b="value"
            )
        elif left[fqn].digest is None or right[fqn].digest is None or left[fqn].digest != right[fqn].digest:
            data = [_object_bytes(c, fqn) for c in (a, b)]
            if data[0] != data[1]:
                yield Difference(
                    fqn=fqn, kind=DifferenceKind.OBJECT, a=f"{len(data[0])} bytes", b=f"{len(data[1])} bytes"
                )


def _object_bytes(checkpoint: Checkpoint, fqn: str) -> bytes:
    entry = checkpoint.manifest.objects_by_fqn[fqn]
    return checkpoint.store.read(checkpoint.path(entry.file), entry.offset, entry.length)


def _compare_state(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Differences of the training state (step, tokens, ...) and the mesh."""
    left, right = dict(a.manifest.training), dict(b.manifest.training)
    for key in sorted({*left, *right}):
        if left.get(key) != right.get(key):
            yield Difference(fqn=key, kind=DifferenceKind.TRAINING, a=_short(left.get(key)), b=_short(right.get(key)))
    if a.manifest.mesh != b.manifest.mesh:
        yield Difference(fqn="", kind=DifferenceKind.MESH, a=str(a.manifest.mesh), b=str(b.manifest.mesh))


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
