"""Agreement of all ranks before a save: that every rank takes part, in the same step, and which rank writes what.

The division is reused while every rank's state keeps its shape, so that a usual save costs one small exchange.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import TitanError
from titan_ckpt.format.digest import digest
from titan_ckpt.format.names import new_attempt
from titan_ckpt.saving.options import SaveRequest
from titan_ckpt.saving.writers import Share, divide
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.exchange import Failure, RankGroup, SaveError, failure_on, raise_failures
from titan_ckpt.state.state_dict import FlatState, LocalShard, flatten, local_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The agreed division: what this rank writes. `share` is set on the coordinator only."""

    signature: bytes
    items: list[LocalShard]
    objects: list[str]
    share: Share | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """This rank's flat state, the plan, and the attempt's name that all ranks share."""

    flat: FlatState
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

    def __init__(self, ranks: RankGroup, mesh: MeshSpec | None) -> None:
        self._ranks, self._mesh = ranks, mesh
        self._plan: SavePlan | None = None

    def reach(self, state: Mapping[str, Any], request: SaveRequest, earlier: BaseException | None) -> Agreed:
        """Agree on a save; an error on one rank is raised on all.

        That includes an `earlier` error that only some ranks know of yet: either all ranks skip this save, or all take part.
        """
        flat: FlatState | None = None
        items: list[LocalShard] = []
        failure: Failure | None = None
        signature = b""
        try:
            if earlier is not None:
                raise earlier
            request.check()
            flat = flatten(state)
            items = [local_shard(fqn, tensor) for fqn, tensor in flat.tensors.items()]
            signature = digest(pickle.dumps((items, sorted(flat.objects))))
        except Exception:  # noqa: BLE001  (raised below, on every rank)
            failure = failure_on(self._ranks)
        is_current = self._plan is not None and self._plan.signature == signature
        mine = _Readiness(failure=failure, has_current_plan=is_current, attempt=new_attempt(), step=request.step)
        ranks = self._ranks.all_gather(mine)
        if earlier is not None:
            raise earlier
        raise_failures([each.failure for each in ranks], f"nothing was committed: the save of step {request.step}")
        if len(steps := {each.step for each in ranks}) > 1:
            shown = ", ".join(f"rank {rank}: {each.step}" for rank, each in enumerate(ranks))
            raise SaveError(f"nothing was committed: the ranks save {len(steps)} different steps at once ({shown})")
        assert flat is not None
        if self._plan is None or not all(each.has_current_plan for each in ranks):
            self._plan = self._divide(items, flat, signature, request.step)
        return Agreed(flat=flat, plan=self._plan, attempt=ranks[0].attempt)

    def _divide(self, items: list[LocalShard], flat: FlatState, signature: bytes, step: int) -> SavePlan:
        held = self._ranks.gather((items, sorted(flat.objects)))
        share: Share | None = None
        failure: Failure | None = None
        orders: list[tuple[list[int], list[str]]] = [([], [])] * self._ranks.world_size
        if self._ranks.is_coordinator:
            try:
                share = divide([entry[0] for entry in held], [entry[1] for entry in held], self._mesh)
                orders = list(zip(share.items, share.objects, strict=True))
            except TitanError:
                failure = failure_on(self._ranks)
        answer = self._ranks.scatter([(failure, order) for order in orders])
        raise_failures([answer[0]], f"nothing was committed: the save of step {step}")
        mine, objects = answer[1]
        return SavePlan(signature=signature, items=[items[index] for index in mine], objects=objects, share=share)
