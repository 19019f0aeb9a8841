"""A soak's own record of checkpoints, their values and the losses that must follow. Reads the server directly."""

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

ON_ANOTHER_MESH = 1e-4  # relative, over a few hundred steps: another mesh sums in another order

Kept: TypeAlias = Callable[[set[int]], set[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A checkpoint as first seen; it must not change."""

    step: int
    manifest_digest: str
    values: str


@dataclass(slots=True)
class LedgerCounts:
    """Counts of checks and findings; `lost` and `wrong` must stay 0."""

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
    """Known checkpoints by run URL and step; `references` holds the losses of uninterrupted runs by seed."""

    open_direct: Callable[[str], Store]
    complain: Callable[[str], None]
    runs: dict[str, dict[int, CommittedStep]] = field(default_factory=dict)
    references: dict[int, list[float]] = field(default_factory=dict)
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    _followed: dict[tuple[int, str, str], dict[int, float]] = field(default_factory=dict)

    def newest(self, url: str) -> int:
        """The newest committed step, 0 if there is none."""
        return max(self.runs.get(url, {}), default=0)

    def values(self, url: str, step: int) -> str:
        """The digest of a checkpoint's values; a fixed label for step 0."""
        return self.runs[url][step].values if step else "the beginning"

    def look(self, url: str, *, promised: Iterable[int] = (), kept: Kept = set) -> set[int]:
        """Compare a run with the ledger, reading every value; return the committed steps.

        Of all steps ever promised or seen as committed, those that `kept` selects must exist unchanged; others may be gone.
        """
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
        """Read a whole checkpoint; add it to the ledger, or compare it with its entry."""
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
            self._wrong(f"{url}@{seen.step} has changed")
        self.runs[url][seen.step] = CommittedStep(step=seen.step, manifest_digest=seen.manifest_digest, values=values)

    def check_losses(self, seed: int, mesh: str, url: str, start: int, values: str, losses: dict[int, float]) -> None:
        """Check the losses after `values` on `mesh`: near the uninterrupted run's, and bit-equal to earlier ones from the same
        values on the same mesh. Record the losses that followed each later checkpoint of the run."""
        self.counts.resumes += bool(start)
        reference = self.references[seed]
        for step, loss in losses.items():
            expected = reference[step - 1]
            error = abs(loss - expected) / abs(expected)
            self.counts.losses += 1
            self.counts.worst_loss = max(self.counts.worst_loss, error)
            if not error <= ON_ANOTHER_MESH:
                self._wrong(f"{url} on {mesh}: loss {loss} at step {step}, {expected} in the uninterrupted run")
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
        """Delete a run and its entries."""
        self.runs.pop(url, None)
        store = self.open_direct(url)
        store.delete([entry.path for entry in store.list()])

    def _wrong(self, text: str) -> None:
        self.counts.wrong += 1
        self.complain(text)


def values_digest(checkpoint: Checkpoint) -> str:
    """One digest of all tensors, by name, and of the training state; reads every byte and verifies its digest."""
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
