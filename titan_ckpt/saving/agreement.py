"""What all ranks agree on before a save: that all take part, in the same step, and which of them writes what.

The division is kept for as long as every rank's state keeps its shape, so that a usual save costs one small exchange.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import TitanError
from titan_ckpt.format.digest import digest
from titan_ckpt.format.names import new_attempt
from titan_ckpt.saving.writers import Share, divide
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.exchange import Failure, RankGroup, SaveError, failure_on, raise_failures
from titan_ckpt.state.state_dict import FlatState, LocalShard, flatten, local_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """One agreed division: what this rank writes. `share` is the coordinator's."""

    signature: bytes
    items: list[LocalShard]
    objects: list[str]
    share: Share | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The flat state of this rank, the plan all ranks share and the attempt's name."""

    flat: FlatState
    plan: SavePlan
    attempt: str


class Agreement:
    """The plan that all ranks share, made anew when the state of any of them changes its shape."""

    def __init__(self, ranks: RankGroup, mesh: MeshSpec | None) -> None:
        self._ranks, self._mesh = ranks, mesh
        self._plan: SavePlan | None = None

    def reach(self, state: Mapping[str, Any], step: int, earlier: BaseException | None) -> Agreed:
        """Agree on a save; an error on one rank is raised on all.

        So is an `earlier` one that only some have been told of: all leave this save out, or all take part in it.
        """
        flat: FlatState | None = None
        items: list[LocalShard] = []
        failure: Failure | None = None
        signature = b""
        try:
            if earlier is not None:
                raise earlier
            flat = flatten(state)
            items = [local_shard(fqn, tensor) for fqn, tensor in flat.tensors.items()]
            signature = digest(pickle.dumps((items, sorted(flat.objects))))
        except Exception:  # noqa: BLE001  (it is raised below, on every rank)
            failure = failure_on(self._ranks)
        is_current = self._plan is not None and self._plan.signature == signature
        answers = self._ranks.all_gather((failure, is_current, new_attempt(), step))
        if earlier is not None:
            raise earlier
        raise_failures([answer[0] for answer in answers], f"nothing was committed: the save of step {step}")
        if len(steps := {answer[3] for answer in answers}) > 1:
            told = ", ".join(f"rank {rank}: {answer[3]}" for rank, answer in enumerate(answers))
            raise SaveError(f"nothing was committed: the ranks save {len(steps)} different steps at once ({told})")
        assert flat is not None
        if self._plan is None or not all(answer[1] for answer in answers):
            self._plan = self._divide(items, flat, signature, step)
        return Agreed(flat=flat, plan=self._plan, attempt=answers[0][2])

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
