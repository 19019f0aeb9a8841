"""A load in which each part of a tensor is read once: its reader sends it to the other ranks that hold it, along a tree.

    prepare on all ranks -> parts gathered on rank 0 -> shares scattered -> batches: read, send on, install -> all agree

Every rank takes its batches in the same order, and a batch is announced before its bytes. A rank that fails goes on: it announces
that its own batches will not come. So nobody waits for what cannot come, and no connection is torn.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import xxhash

from titan_ckpt.errors import CheckpointError
from titan_ckpt.loading.policy import is_judged_by_values
from titan_ckpt.loading.read_plan import ReadPlan, Region, reading
from titan_ckpt.loading.readers import Readers
from titan_ckpt.loading.shared.agreement import GRACE_S, Agreement, UnsentError
from titan_ckpt.loading.shared.landing import Landing
from titan_ckpt.loading.shared.shares import PART, Batch, Parts, assign, part_row
from titan_ckpt.loading.shared.tree import Tree
from titan_ckpt.state.exchange import Purpose, RankGroup

AHEAD_BYTES = 256 << 20
CHANGED = "some tensors are not loaded: load again before you use the state"
UNCHANGED = "nothing was loaded"
LOADING = Purpose(
    verb="load",
    error=CheckpointError,
    option="LoadPolicy(timeout_s=)",
    after_loss="If a process has died, restart the job. If one was only slow, take a longer LoadPolicy(timeout_s=)",
)
T = TypeVar("T")


def load_shared(prepare: Callable[[], T], plan_of: Callable[[T], ReadPlan], *, give_up_at: float) -> T:
    """`prepare` on every rank of the job, then fill the plans together. Returns what `prepare` returned.

    If one rank fails, all raise: its own error there, CheckpointError on the others, which names it. No rank waits much longer
    than until `give_up_at` (of `time.monotonic`) for another.
    """
    ranks = RankGroup(timeout_s=max(give_up_at - time.monotonic(), 1.0), purpose=LOADING)
    try:
        agreement = Agreement(ranks, give_up_at)
        prepared = agreement.on("prepare", UNCHANGED, prepare)
        plan = plan_of(prepared)
        plan.count_needed()
        outcome = UNCHANGED if is_judged_by_values(plan.policy) else CHANGED
        with reading(plan, give_up_at) as readers:
            regions = [*plan.staged, *plan.direct]
            batches = agreement.on("share", UNCHANGED, lambda: _shares(ranks, plan, regions))
            run = _Run(Tree(ranks, give_up_at + GRACE_S), plan, batches, regions, readers)
            agreement.on("read", outcome, run.run)
        agreement.on("judge", UNCHANGED, plan.judge_values)
        plan.install()
        return prepared
    finally:
        ranks.close()


def _shares(ranks: RankGroup, plan: ReadPlan, regions: Sequence[Region]) -> list[Batch]:
    """This rank's batches. CheckpointError if the ranks have opened different checkpoints."""
    manifest = plan.checkpoint.manifest
    paths = sorted({file.path for file in manifest.files} | {each.chunk.file for each in regions})
    number = {path: n for n, path in enumerate(paths)}
    rows = [
        part_row(number[each.chunk.file], each.chunk.offset, each.entry.fqn, each.box, each.size_bytes)
        for each in regions
    ]
    identity = xxhash.xxh3_128_hexdigest(
        repr((plan.checkpoint.step, manifest.attempt, len(manifest.chunks), paths)).encode()
    )
    found = ranks.gather((identity, str(plan.checkpoint), np.array(rows, dtype=PART)))
    share = ranks.scatter(_assigned(found, ranks.world_size))
    if isinstance(share, str):
        raise CheckpointError(share)
    return share


def _assigned(found: Sequence[tuple[str, str, Parts]], world_size: int) -> list[list[Batch] | str]:
    """Each rank's share, or why there is none; nothing on the ranks that have gathered nothing."""
    for rank, (identity, name, _) in enumerate(found):
        if identity != found[0][0]:
            text = (
                f"rank 0 opened {found[0][1]} and rank {rank} {name}, which is another checkpoint: with broadcast all ranks must "
                "load the same one. Name its step (URL@STEP)"
            )
            return [text] * world_size
    return [*assign([parts for _, _, parts in found])] if found else []


class _Run:
    """One rank's part of a load: what it reads for itself and for others, and what others read for it."""

    def __init__(
        self, tree: Tree, plan: ReadPlan, batches: Sequence[Batch], regions: Sequence[Region], readers: Readers
    ) -> None:
        self._tree, self._plan, self._batches, self._readers = tree, plan, batches, readers
        self._regions = list(regions)
        self._own = deque(batch for batch in batches if batch.reader == tree.rank)
        self._begun: dict[int, tuple[Landing, list[Future[None]]]] = {}
        self._ahead_bytes = 0
        self._alone_items: list[int] = []
        self._alone: list[Future[None]] = []
        self._has_begun_alone = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Take every batch, then what this rank alone needs. Raises the first error when the others cannot wait for it."""
        self._try(self._locate)
        for batch in self._batches:
            self._try(self._read_ahead)
            if batch.reader == self._tree.rank:
                self._send(batch)
            else:
                self._receive(batch)
        self._try(self._read_ahead)
        self._try(self._await_alone)
        self._tree.finish()
        if self._error is not None:
            raise self._error

    def _try(self, action: Callable[[], None]) -> None:
        """Run `action` unless this rank has failed; remember its error: the other ranks still have to hear of it."""
        if self._error is None:
            try:
                action()
            except BaseException as error:  # noqa: BLE001  (`run` raises it)
                self._error = error

    def _locate(self) -> None:
        shared = {item for batch in self._batches for item in batch.items}
        own = [n for n in range(len(self._regions)) if n not in shared]
        self._alone_items = own
        for batch in self._own:
            own = own + batch.items
        for n, region in zip(own, self._plan.located([self._regions[n] for n in own], self._readers), strict=True):
            self._regions[n] = region

    def _read_ahead(self) -> None:
        """Begin to read this rank's next batches, then what it alone needs."""
        while self._own and (not self._begun or self._ahead_bytes < AHEAD_BYTES):
            batch = self._own.popleft()
            landing = self._landing(batch)
            requests = map(self._plan.request, landing.inside())
            self._begun[batch.number] = (landing, self._readers.read(requests))
            self._ahead_bytes += len(landing.memory)
        if not self._own and not self._has_begun_alone:
            self._has_begun_alone = True
            requests = map(self._plan.request, [self._regions[n] for n in self._alone_items])
            self._alone = self._readers.read(requests)

    def _await_alone(self) -> None:
        self._readers.all(self._alone)

    def _landing(self, batch: Batch) -> Landing:
        return Landing([self._regions[n] for n in batch.items])

    def _send(self, batch: Batch) -> None:
        """Send a batch of this rank's when it is read; if this rank has failed, the word that it will not come."""
        memory: list[memoryview] = []

        def finish() -> None:
            landing, reads = self._begun.pop(batch.number)
            self._readers.all(reads)
            self._ahead_bytes -= len(landing.memory)
            landing.install()
            memory.append(landing.memory)

        self._try(finish)
        self._tree.send(batch, memory[0] if memory else None)

    def _receive(self, batch: Batch) -> None:
        """Receive a batch and pass it on, even if this rank has failed: others wait for it."""
        landing = self._landing(batch)
        try:
            self._tree.receive(batch, landing.memory)
        except UnsentError as error:
            first = f"{landing.names}: {error}"
            self._error = self._error or UnsentError(first)
            return
        self._plan.report.received_bytes += sum(self._regions[n].size_bytes for n in batch.items)
        landing.install()
