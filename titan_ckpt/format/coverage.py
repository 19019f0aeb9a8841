"""Prove that the chunks of a manifest tile its tensors and that each raw payload has the size of its box.

Whoever opens a checkpoint proves this before a byte is used; whoever commits one, before it can be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from titan_ckpt.format.dtypes import ELEMENT_SIZE
from titan_ckpt.format.manifest import RAW, Manifest, TensorEntry
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.sharding.tiling import TooIrregularError, find_flaws

BOXES_AT_ONCE = 1 << 20
MAX_ELEMENTS = 1 << 62
SHOWN = 5


def coverage_problems(manifest: Manifest) -> dict[str, str]:
    """What is wrong with the chunks of each tensor, by FQN; empty if every tensor is covered exactly once.

    Tensors with equal shapes and boxes, such as the layers of a model, are proved once.
    """
    found: dict[str, str] = {}
    cuts: dict[tuple[Shape, bytes, bytes], _Cut] = {}
    for tensor in manifest.tensors:
        offsets, sizes = manifest.boxes(tensor)
        if prod(tensor.global_shape) > MAX_ELEMENTS or min(tensor.global_shape, default=0) < 0:
            found[tensor.fqn] = f"{tensor.global_shape} is not the shape of a tensor"
            continue
        key = (tensor.global_shape, offsets.tobytes(), sizes.tobytes())
        cuts.setdefault(key, _Cut(tensor.global_shape, offsets, sizes)).fqns.append(tensor.fqn)
    for cut, problem in _flawed(cuts.values()):
        found |= dict.fromkeys(cut.fqns, problem)
    found |= _payload_problems(manifest, cuts.values())
    return {tensor.fqn: found[tensor.fqn] for tensor in manifest.tensors if tensor.fqn in found}


def describe(problems: Mapping[str, str]) -> str:
    """Several problems as one line."""
    shown = "; ".join(f"{fqn}: {problem}" for fqn, problem in list(problems.items())[:SHOWN])
    return shown if len(problems) <= SHOWN else f"{shown}; and {len(problems) - SHOWN} more tensors"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A shape, its boxes, and the tensors that are cut so."""

    global_shape: Shape
    offsets: Int64s
    sizes: Int64s
    fqns: list[str] = field(default_factory=list)

    def volume(self) -> int:
        """Elements in all boxes together; a box outside the tensor may make it any number."""
        return int(self.sizes.prod(axis=1).sum())


def _flawed(cuts: Iterable[_Cut]) -> Iterator[tuple[_Cut, str]]:
    by_ndim: dict[int, list[_Cut]] = {}
    for cut in cuts:
        by_ndim.setdefault(len(cut.global_shape), []).append(cut)
    for equal in by_ndim.values():
        batch, count = list[_Cut](), 0
        for cut in equal:
            if batch and count + len(cut.offsets) > BOXES_AT_ONCE:
                yield from _judge(batch)
                batch, count = [], 0
            batch.append(cut)
            count += len(cut.offsets)
        yield from _judge(batch)


def _judge(batch: list[_Cut]) -> Iterator[tuple[_Cut, str]]:
    owner = np.repeat(np.arange(len(batch)), [len(cut.offsets) for cut in batch])
    offsets, sizes = (np.concatenate([getattr(cut, name) for cut in batch]) for name in ("offsets", "sizes"))
    try:
        flaws = find_flaws([cut.global_shape for cut in batch], owner, offsets, sizes)
    except TooIrregularError as error:
        if len(batch) == 1:
            yield batch[0], f"cannot be proved to cover it: {error}"
            return
        for cut in batch:
            yield from _judge([cut])
        return
    for index, flaw in flaws.items():
        cut = batch[index]
        held = "" if flaw.count < 0 else f"; {len(cut.offsets)} chunks hold {cut.volume()} of {prod(cut.global_shape)}"
        yield cut, f"{flaw}{held}"


def _payload_problems(manifest: Manifest, cuts: Iterable[_Cut]) -> dict[str, str]:
    """Tensors with a raw payload of another size than its box. Foreign payloads (length -1) are checked when they are located."""
    raw = manifest.codecs.index(RAW) if RAW in manifest.codecs else -1
    found = {}
    for cut in cuts:
        elements = cut.sizes.prod(axis=1)
        for fqn in cut.fqns:
            if _has_other_size(manifest, manifest.by_fqn[fqn], elements, raw):
                found[fqn] = f"a chunk's payload has not the size of its box in {manifest.by_fqn[fqn].dtype}"
    return found


def _has_other_size(manifest: Manifest, tensor: TensorEntry, elements: Int64s, raw: int) -> bool:
    rows = slice(tensor.first_chunk, tensor.first_chunk + tensor.num_chunks)
    lengths = manifest.chunks.payload_length[rows]
    is_other = (
        (lengths != elements * ELEMENT_SIZE[tensor.dtype]) & (manifest.chunks.codec[rows] == raw) & (lengths >= 0)
    )
    return bool(is_other.any())
