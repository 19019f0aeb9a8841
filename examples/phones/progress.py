"""The progress of a stage as checkpoints: each stage is a run of titan-ckpt, its step the number of units of work that are done.

Ranks agree after each unit whether a checkpoint is due, and whether the crew must form anew because a peer waits to join.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, zeros

import titan_ckpt

log = logging.getLogger(__name__)
AXIS = "dp_shard"


class Regroup(Exception):  # noqa: N818 - not an error
    """All ranks have saved and leave, so that a peer can join."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The ranks of one generation as a stage sees them. `open_store(stage)` is where its checkpoints lie."""

    mesh: DeviceMesh
    open_store: Callable[[str], titan_ckpt.Store]
    is_knocked: Callable[[], bool]
    report: Callable[..., None]
    save_every_s: float = 10.0
    timeout_s: float = 60.0

    @property
    def rank(self) -> int:
        """This peer's number in the crew."""
        return self.mesh.get_rank()

    @property
    def size(self) -> int:
        """Number of peers."""
        return self.mesh.size()

    def rows(self, count: int) -> range:
        """Which of `count` rows this rank has under `Shard(0)`."""
        each = -(-count // self.size)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def sharded(self, local: Tensor, count: int) -> DTensor:
        """This rank's rows as part of a tensor of `count` rows."""
        shape = torch.Size([count, *local.shape[1:]])
        strides = local.new_empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=strides)

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on some rank."""
        both = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return [bool(flag) for flag in both]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A committed checkpoint of a stage: units `first` up to `step`, and whether the stage ends with it."""

    first: int
    step: int
    is_last: bool


class Stage:
    """Reads what earlier crews have committed, and saves what this one adds. A context manager; all ranks take part."""

    def __init__(self, crew: Crew, name: str, *, keep: int | None = None) -> None:
        self.crew, self.name = crew, name
        self._store = crew.open_store(name)
        self._keep = keep
        self._saver: titan_ckpt.Saver | None = None
        self._saved_at = time.monotonic()
        self.saved = self._agreed_list()
        crew.report("resumed", stage=name, step=self.saved[-1].step if self.saved else 0)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, error, trace)
        if error is None:
            self.crew.report("finished", stage=self.name)

    @property
    def is_finished(self) -> bool:
        """Whether an earlier crew has committed the stage's end."""
        return bool(self.saved) and self.saved[-1].is_last

    def open(self, step: int) -> titan_ckpt.Checkpoint:
        """A committed checkpoint."""
        return titan_ckpt.open_checkpoint(self._store.url, step=step, store=self._store)

    def load(self, state: dict[str, Any], step: int) -> dict[str, Any]:
        """Fill a state from a committed step, cut for this crew."""
        titan_ckpt.load(self.open(step), state, policy=self._policy())
        return state

    def load_sharded(self, step: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """This rank's rows of every tensor of a step; `dtypes` by the last part of a tensor's name."""
        checkpoint = self.open(step)
        state: dict[str, Any] = {
            fqn: zeros(
                entry.global_shape,
                dtype=dtypes[fqn.rpartition(".")[2]],
                device_mesh=self.crew.mesh,
                placements=[Shard(0)],
            )
            for fqn, entry in checkpoint.manifest.by_fqn.items()
        }
        titan_ckpt.load(checkpoint, state, policy=self._policy())
        return {fqn: tensor.to_local() for fqn, tensor in state.items()}

    def is_due(self, *, is_last: bool) -> bool:
        """After a unit of work, on every rank: whether to call `save` now."""
        late, knocked = self.crew.any(
            time.monotonic() - self._saved_at > self.crew.save_every_s, self.crew.is_knocked()
        )
        return late or knocked or is_last

    def save(self, state: dict[str, Any], *, first: int, step: int, is_last: bool) -> None:
        """Start to save; the upload goes on while the next units are computed. Regroup, once it is committed, if a peer waits."""
        if self._saver is None:
            self._saver = titan_ckpt.Saver(self._store, self._options())
        handle = self._saver.save(state, step=step, user={"first": first, "is_last": is_last})
        self._saved_at = time.monotonic()
        self.crew.report("saved", stage=self.name, step=step)
        if not is_last and self.crew.any(self.crew.is_knocked())[0]:
            handle.wait()
            raise Regroup

    def _options(self) -> titan_ckpt.SaveOptions:
        retention = None if self._keep is None else titan_ckpt.RetentionPolicy(keep_last=self._keep)
        mesh = titan_ckpt.MeshSpec.of({AXIS: self.crew.size})
        return titan_ckpt.SaveOptions(
            mesh=mesh, retention=retention, timeout_s=self.crew.timeout_s, is_exclusive=False, codec="planes-zstd"
        )  # fmt: skip

    def _policy(self) -> titan_ckpt.LoadPolicy:
        return titan_ckpt.LoadPolicy(timeout_s=self.crew.timeout_s, threads=2)

    def _agreed_list(self) -> list[Saved]:
        """The committed steps as rank 0 sees them, so that all ranks go on from the same one."""
        found: list[list[Saved]] = [[]]
        if self.crew.rank == 0:
            infos = titan_ckpt.list_checkpoints(self._store)
            found = [[self._describe(info.step) for info in infos if info.is_resumable]]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _describe(self, step: int) -> Saved:
        user = self.open(step).manifest.user
        return Saved(first=user["first"], step=step, is_last=user["is_last"])
