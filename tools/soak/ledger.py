"""A soak's own books: which checkpoints exist, what their values are, which losses must follow. Reads the server directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import xxhash

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.loading.load import load
from titan_ckpt.store.base import Store

ON_ANOTHER_MESH = 1e-4  # of a loss, relative, over a few hundred steps: sums are taken in another order there

Kept: TypeAlias = Callable[[set[int]], set[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A checkpoint as it was when it was first seen; it must stay that."""

    step: int
    manifest_digest: str
    values: str


@dataclass(slots=True)
class LedgerCounts:
    """What the ledger looked at, and what it found; `lost` and `wrong` must stay 0."""

    committed: int = 0
    looks: int = 0
    deep_looks: int = 0
    losses: int = 0
    losses_bit_equal: int = 0
    resumes: int = 0
    pruned: int = 0
    lost: int = 0
    wrong: int = 0
    worst_loss: float = 0.0


@dataclass(slots=True)
class Ledger:
    """`runs` by URL; `references` are the losses of uninterrupted runs by seed."""

    open_direct: Callable[[str], Store]
    complain: Callable[[str], None]
    runs: dict[str, dict[int, CommittedStep]] = field(default_factory=dict)
    references: dict[int, list[float]] = field(default_factory=dict)
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    _followed: dict[tuple[int, str, str], dict[int, float]] = field(default_factory=dict)

    def newest(self, url: str) -> int:
        """The newest committed step, 0 without one."""
        return max(self.runs.get(url, {}), default=0)

    def values(self, url: str, step: int) -> str:
        """The digest of a checkpoint's values; of none, where the run began."""
        return self.runs[url][step].values if step else "the beginning"

    def look(self, url: str, *, promised: Iterable[int] = (), kept: Kept = set) -> set[int]:
        """Compare a run with the books, reading every value: of all steps that were ever said or seen to be committed, those in
        `kept` of them are there, unchanged; the others may be gone. Returns the steps that are there."""
        store, known = self.open_direct(url), self.runs.setdefault(url, {})
        present = {info.step: info for info in list_checkpoints(store)}
        committed = {step for step, info in present.items() if info.state == "committed"}
        self.counts.looks += 1
        for step in sorted(kept({*known, *promised, *committed}) - committed):
            self.counts.lost += 1
            self.complain(f"{url}@{step} is lost: {present.get(step)}")
        for step in set(known) - committed:
            del known[step]
            self.counts.pruned += 1
        for step, info in present.items():
            if info.state == "damaged":
                self._wrong(f"{url}@{step} is damaged: {info.problem}")
            elif info.commit is not None and info.state == "committed":
                self._enter(
                    store, url, CommittedStep(step=step, manifest_digest=info.commit.manifest_digest, values="")
                )
        return committed

    def _enter(self, store: Store, url: str, seen: CommittedStep) -> None:
        """Read a checkpoint whole; enter it where it is new."""
        old = self.runs[url].get(seen.step)
        try:
            checkpoint = open_checkpoint(url, step=seen.step, store=store, on_damage="error")
            values = values_digest(checkpoint)
            self.counts.deep_looks += 1
        except TitanError as error:
            self._wrong(f"{url}@{seen.step} cannot be read: {error}")
            return
        if old is None:
            self.counts.committed += 1
            problems = verify(checkpoint, read_data=True)
            if problems:
                self._wrong(f"{url}@{seen.step} is not whole: {problems}")
        elif (old.manifest_digest, old.values) != (seen.manifest_digest, values):
            self._wrong(f"{url}@{seen.step} is no longer what it was")
        self.runs[url][seen.step] = CommittedStep(step=seen.step, manifest_digest=seen.manifest_digest, values=values)

    def check_losses(self, seed: int, mesh: str, url: str, start: int, values: str, losses: dict[int, float]) -> None:
        """Losses that followed from `values` on `mesh`: near those of the run without interruption, and equal in every bit to
        what followed from the same values on the same mesh before. What followed from later checkpoints is kept."""
        self.counts.resumes += bool(start)
        reference = self.references[seed]
        for step, loss in losses.items():
            expected = reference[step - 1]
            error = abs(loss - expected) / abs(expected)
            self.counts.losses += 1
            self.counts.worst_loss = max(self.counts.worst_loss, error)
            if not error <= ON_ANOTHER_MESH:
                self._wrong(f"{url} on {mesh}: loss {loss} at step {step}, {expected} without interruption")
        before = self._followed.setdefault((seed, values, mesh), {})
        for step in before.keys() & losses.keys():
            self.counts.losses_bit_equal += 1
            if before[step] != losses[step]:
                self._wrong(
                    f"{url} on {mesh} from step {start}: loss {losses[step]!r} at {step}, before {before[step]!r}"
                )
        before.update(losses)
        for step, committed in self.runs.get(url, {}).items():
            if step in losses:
                later = {number: loss for number, loss in losses.items() if number > step}
                self._followed.setdefault((seed, committed.values, mesh), {}).update(later)

    def forget(self, url: str) -> None:
        """Delete a run that has served its turn."""
        self.runs.pop(url, None)
        store = self.open_direct(url)
        store.delete([entry.path for entry in store.list()])

    def _wrong(self, text: str) -> None:
        self.counts.wrong += 1
        self.complain(text)


def values_digest(checkpoint: Checkpoint) -> str:
    """One digest of all tensors, in order of name, and of the training state; every byte is read and its own digest checked."""
    tensors = {
        fqn: torch.empty(entry.global_shape, dtype=getattr(torch, entry.dtype))
        for fqn, entry in sorted(checkpoint.manifest.by_fqn.items())
    }
    load(checkpoint, tensors)
    training = {key: value for key, value in checkpoint.manifest.training.items() if key != "lr"}
    digest = xxhash.xxh3_128(json.dumps(training, sort_keys=True).encode())
    for fqn, tensor in tensors.items():
        digest.update(fqn.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
