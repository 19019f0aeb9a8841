"""Small exchanges between all ranks, on the CPU: stop codes, step times, the choice of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from titan_ckpt.errors import TitanError

T = TypeVar("T")


class ControlGroup:
    """A gloo group of all ranks; every method is collective, the constructor included. Without other ranks it does nothing."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self._timeout_s = timeout_s
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def set_timeout(self, seconds: float | None) -> None:
        """Set how long a rank waits for the others from now on; None restores the timeout of the constructor."""
        if self._group is not None:
            _set_pg_timeout(timedelta(seconds=self._timeout_s if seconds is None else seconds), self._group)

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        result: list[float] = values.tolist()
        return result

    def all_reduce_sum(self, numbers: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks."""
        values = torch.tensor(numbers, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        result: list[float] = values.tolist()
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's value on rank 0, an empty list elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value on every rank, in order of rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def from_first(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on rank 0, which alone calls it; its TitanError is raised on every rank."""
        answer: T | TitanError | None = None
        if self._group is None or dist.get_rank() == 0:
            try:
                answer = ask()
            except TitanError as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, TitanError):
            raise answer
        return cast(T, answer)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self._group is not None:
            dist.barrier(group=self._group)
