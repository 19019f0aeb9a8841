"""The ranks of a job as a checkpoint needs them: few, small exchanges on a gloo group of their own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """All ranks of the default process group, or this process alone where there is none. Made by all ranks together."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank commits."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value on the coordinator, an empty list elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """The coordinator's `values[rank]`."""
        if self._group is None:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values if self.is_coordinator else None, src=0, group=self._group)
        result: T = received[0]
        return result

    def broadcast(self, value: T) -> T:
        """The coordinator's value."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None
