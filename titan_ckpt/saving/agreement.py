"""Agreement of all ranks before a save: that every rank takes part, in the same step, and which rank writes what.

Each rank first does everything that can fail by itself (`prepare`); the exchange then tells all ranks of all failures. The
division is reused while every rank's state keeps its shape, so that a usual save costs one small exchange.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from titan_ckpt.errors import SaveError, UsageError
from titan_ckpt.format.digest import digest
from titan_ckpt.format.names import new_attempt
from titan_ckpt.format.structure import Structure, merge
from titan_ckpt.saving.options import SaveRequest
from titan_ckpt.saving.replicas import Replicas
from titan_ckpt.saving.writers import Share, divide
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.exchange import Failure, RankGroup, failure_of, raise_failures, save_error
from titan_ckpt.state.flatten import FlatState, flatten
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.state.state_dict import detached_shard, has_part_of, local_shard
from titan_ckpt.state.values import Encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """This rank's part in a save, before the ranks agree: its shards, its other values as bytes, and the checked request."""

    flat: FlatState
    items: list[LocalShard]
    objects: dict[str, bytes]
    request: SaveRequest
    signature: bytes


def prepare(state: Mapping[str, Any], request: SaveRequest) -> Prepared:
    """Flatten and check `state`, serialise its values, redact the request. UsageError for what cannot be stored."""
    request.check()
    flat = flatten(state)
    if flat.reduced:
        name, what = next(iter(flat.reduced.items()))
        _warn_once(f"{name}: {what} from `read_all`", len(flat.reduced) - 1)
    own = {fqn: tensor for fqn, tensor in flat.tensors.items() if has_part_of(tensor)}
    for fqn, tensor in own.items():
        _check_has_values(fqn, tensor)
    items = [local_shard(fqn, tensor) for fqn, tensor in own.items()]
    encoder = Encoder()
    objects = {fqn: encoder.encode(fqn, value) for fqn, value in flat.objects.items()}
    return Prepared(
        flat=flat, items=items, objects=objects, request=request.redacted(), signature=_signature(flat, items)
    )


@cache
def _warn_once(what: str, more: int) -> None:
    """Say it at the first of many saves."""
    log.warning("%s%s; a load keeps the containers of the state", what, f", and {more} more" if more else "")


def _signature(flat: FlatState, items: Sequence[LocalShard]) -> bytes:
    """What the division of a save depends on. JSON takes a third of the time of a pickle of the records."""
    rows = [(i.fqn, i.dtype, i.global_shape, i.placements, i.offsets, i.sizes) for i in items]
    return digest(json.dumps((rows, flat.structure)).encode())


def _check_has_values(fqn: str, tensor: torch.Tensor) -> None:
    """UsageError for a tensor without memory, or without a shape."""
    if is_lazy(tensor):
        raise UsageError(f"{fqn}: is not initialised and has no shape yet; run the module's forward once before saving")
    local = tensor if type(tensor) is torch.Tensor else detached_shard(tensor)
    if local.is_meta or isinstance(local, FakeTensor):
        raise UsageError(
            f"{fqn}: is on the meta device and has no values to save; give it some first (module.to_empty(device=...), then load "
            "or initialise it), or leave it out of the state"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The agreed division: what this rank writes, and its copies of what others hold too. `share` is set on the coordinator only.

    `copies` are indices into this rank's items, one list for each bucket of `replicas.buckets_of`.
    """

    signature: bytes
    items: list[LocalShard]
    objects: list[str]
    copies: list[list[int]]
    share: Share | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The plan, and the attempt's name that all ranks share."""

    plan: SavePlan
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Readiness:
    """A rank's contribution to the agreement; only the coordinator's `attempt` counts."""

    failure: Failure | None
    has_current_plan: bool
    attempt: str
    step: int


class Agreement:
    """The save plan of all ranks, made anew when the state of any rank changes its shape."""

    def __init__(self, ranks: RankGroup, mesh: MeshSpec | None, *, replicas: Replicas) -> None:
        self._ranks, self._mesh, self._replicas = ranks, mesh, replicas
        self._plan: SavePlan | None = None
        self.end()

    def end(self) -> None:
        """Forget how far the agreement came: its save is over."""
        self.is_reached = self._is_asked = self._must_divide = self._are_items_sent = False

    def finish(self, step: int, error: BaseException) -> None:
        """Take part in what is left of an agreement that this rank cannot go on with, so that the others learn of it at once."""
        if not self._is_asked:
            with suppress(SaveError):
                self.reach(step, None, error)
        elif self._must_divide:
            failure = failure_of(self._ranks.rank, error)
            if not self._are_items_sent:
                self._ranks.gather((failure, list[LocalShard](), list[str](), ()))
            answer = self._ranks.scatter([(failure, _NOTHING)] * self._ranks.world_size)
            self.is_reached = answer[0] is None

    def reach(self, step: int, mine: Prepared | None, error: BaseException | None) -> Agreed:
        """Agree on a save; `mine` is None if this rank failed with `error`, which SaveError then tells every rank.

        Between two exchanges nothing may raise on one rank alone, or the others would wait for it. Afterwards `is_reached`
        says whether they all go on, whatever happens here.
        """
        ready = self._readiness(step, mine, error)
        ranks = self._ranks.all_gather(ready)
        self._is_asked = True
        is_current = self._plan is not None and all(each.has_current_plan for each in ranks)
        failure, refusal = None, None
        try:
            refusal = _refusal(ranks, step)
        except BaseException as caught:  # noqa: BLE001  (raised on every rank)
            failure = caught
        if refusal is not None:
            raise refusal
        if not is_current:
            self._must_divide = True
            self._plan = self._divide(mine, step, failure)
        self.is_reached = True
        if failure is not None:
            raise failure
        assert self._plan is not None
        return Agreed(plan=self._plan, attempt=ranks[0].attempt)

    def _readiness(self, step: int, mine: Prepared | None, error: BaseException | None) -> _Readiness:
        try:
            failure = None if error is None else failure_of(self._ranks.rank, error)
            is_current = mine is not None and self._plan is not None and self._plan.signature == mine.signature
            return _Readiness(failure=failure, has_current_plan=is_current, attempt=new_attempt(), step=step)
        except BaseException as caught:  # noqa: BLE001  (raised on every rank)
            failure = failure_of(self._ranks.rank, caught)
            return _Readiness(failure=failure, has_current_plan=False, attempt="", step=step)

    def _divide(self, mine: Prepared | None, step: int, error: BaseException | None) -> SavePlan:
        failure = None if error is None else failure_of(self._ranks.rank, error)
        held = self._ranks.gather(
            (failure, [], [], ()) if mine is None else (failure, mine.items, sorted(mine.objects), mine.flat.structure)
        )
        self._are_items_sent = True
        share, answers = self._answers(held)
        failure, (order, objects, copies) = self._ranks.scatter(answers)
        self._must_divide = False
        self.is_reached = failure is None
        raise_failures([failure], f"nothing was committed: the save of step {step}")
        assert mine is not None
        items = [mine.items[index] for index in order]
        return SavePlan(signature=mine.signature, items=items, objects=objects, copies=copies, share=share)

    def _answers(self, held: list[_Held]) -> tuple[Share | None, list[_Answer]]:
        """On the coordinator the share, and for each rank its part of it or the error; nothing elsewhere."""
        if not self._ranks.is_coordinator:
            return None, [(None, _NOTHING)]
        failed = next((failure for failure, *_ in held if failure is not None), None)
        if failed is not None:
            return None, [(failed, _NOTHING)] * self._ranks.world_size
        try:
            items, names = [each[1] for each in held], [each[2] for each in held]
            share = divide(items, names, self._mesh, replicas=self._replicas)
            share = replace(share, structure=merge([each[3] for each in held]))
            return share, [(None, orders) for orders in zip(share.items, share.objects, share.copies, strict=True)]
        except BaseException as error:  # noqa: BLE001  (raised on every rank)
            return None, [(failure_of(self._ranks.rank, error), _NOTHING)] * self._ranks.world_size


_Held = tuple[Failure | None, list[LocalShard], list[str], Structure]
_Orders = tuple[list[int], list[str], list[list[int]]]
_Answer = tuple[Failure | None, _Orders]
_NOTHING: _Orders = ([], [], [])


def _refusal(ranks: list[_Readiness], step: int) -> SaveError | None:
    """Why no rank saves: one is not ready, or they save different steps."""
    failures = [each.failure for each in ranks if each.failure is not None]
    if failures:
        return save_error(failures, f"nothing was committed: the save of step {step}")
    if len(steps := {each.step for each in ranks}) > 1:
        shown = ", ".join(f"rank {rank}: {each.step}" for rank, each in enumerate(ranks))
        return SaveError(f"nothing was committed: the ranks save {len(steps)} different steps at once ({shown})")
    return None
