"""Load what DCP's planner asks for and we store otherwise: wrapper subclasses (torchao's) and quantised tensors.

DCP's index lists what is stored: the inner tensors of a wrapper subclass and its mark (`format.structure`), not its own name.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.objects import read_object, read_object_bytes
from titan_ckpt.checkpoint.subclasses import known_and
from titan_ckpt.errors import UsageError
from titan_ckpt.format.structure import MARK, mark_of
from titan_ckpt.loading.load import add_state
from titan_ckpt.loading.objects import read_objects, settle
from titan_ckpt.loading.policy import LoadPolicy, LoadReport, OnMismatch
from titan_ckpt.loading.read_plan import ReadPlan
from titan_ckpt.state.classes import named
from titan_ckpt.state.flatten import flatten


class WithSubclasses(dict[str, STORAGE_TYPES]):
    """DCP's entries by name. Wrapper subclasses are found by their own names, too, but only their inner tensors are listed.

    A mark is read when its tensor is first asked for.
    """

    def __init__(self, entries: Mapping[str, STORAGE_TYPES], checkpoint: Checkpoint, allow: Sequence[Any]) -> None:
        super().__init__(entries)
        self._checkpoint, self._allow = checkpoint, allow

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or super().__contains__(f"{name}.{MARK}")

    def __missing__(self, name: str) -> TensorStorageMetadata:
        marked = f"{name}.{MARK}"
        if not super().__contains__(marked):
            raise KeyError(name)
        mark = mark_of(read_object(self._checkpoint, marked, allowed=known_and(named(self._allow))))
        if mark is None:
            raise KeyError(name)
        size = torch.Size(mark.shape)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, mark.dtype)),
            size=size,
            chunks=[ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
        )


def add_subclasses(reads: ReadPlan, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Plan the reads of wrapper subclasses. LoadContractError if the checkpoint has other tensors under their names."""
    by_fqn, state = reads.checkpoint.manifest.by_fqn, getattr(planner, "state_dict", {})
    names = {item.storage_index.fqn: item.dest_index.fqn for item in plan.items if item.type != LoadItemType.BYTE_IO}
    wanted = {stored: state.get(name) for stored, name in names.items() if stored not in by_fqn}
    for name, whole in wanted.items():
        if not isinstance(whole, torch.Tensor):
            raise UsageError(
                f"{name}: {type(planner).__name__} has no `state_dict` that holds this tensor, which is stored part by part: "
                "use torch's DefaultLoadPlanner, or titan_ckpt.load"
            )
    add_state(reads, flatten(wanted), replace(reads.policy, extra=OnMismatch.ALLOW), LoadReport())


def load_value(checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner, policy: LoadPolicy) -> None:
    """A value; a quantised tensor into the one that is there, as DCP does, if its elements fit."""
    name = item.storage_index.fqn
    present = getattr(planner, "state_dict", {}).get(item.dest_index.fqn)
    if isinstance(present, torch.Tensor):
        found = read_objects(checkpoint, [name], {name: present}, policy)[name]
        if settle(present, found) is present:
            return
    planner.load_bytes(item, io.BytesIO(read_object_bytes(checkpoint, name)))
