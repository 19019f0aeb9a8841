"""One fault at one store call of one rank in a job of real ranks: what each rank observed, and what remains in the store.

A case saves one step on a healthy store, arms the fault and saves four more. `judge` lists violations of:

  a step fails on all ranks or on none; at most one step fails; later steps succeed
  after each step the newest checkpoint is the last successful one or the one just tried, complete and correct
  a hanging call that is released at the end changes none of this
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.store import ERRORS, FaultMode, FaultyStore, StoreFault
from tools.rank_pool import RankPool

HANG_TIMEOUT_S, TIMEOUT_S = 4.0, 60.0
KINDS = ("sync", "async", "codec", "retention", "mirror")
STEPS = (2, 3, 4, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultCase:
    """`store` is the primary ("first") or the mirror ("second"); `number` counts its calls on `rank` from step 2 on."""

    kind: str
    store: str
    rank: int
    number: int
    how: FaultMode
    error: int = 0


@dataclass(slots=True)
class RankOutcome:
    """Observations of one rank; `wrong` lists what rank 0 found wrong in the run after each step."""

    call: str = ""
    calls: dict[str, list[str]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    mirror_errors: int = 0
    warnings: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def make_state(step: int) -> dict[str, Any]:
    """Tensors whose values encode the step, and two that never change."""
    changing = {f"w{n}": torch.full((300 + n,), float(step)) for n in range(4)}
    return {"model": changing, "frozen": {"a": torch.arange(500.0), "b": torch.arange(100.0)}, "step": step}


def options_of(kind: str, mirror: FaultyStore, timeout_s: float) -> SaveOptions:
    """The options of one of `KINDS`."""
    if kind == "codec":
        return SaveOptions(codec="planes-zstd", incremental=True, timeout_s=timeout_s)
    if kind == "retention":
        return SaveOptions(retention=RetentionPolicy(keep_last=1), incremental=True, timeout_s=timeout_s)
    if kind == "mirror":
        keep = RetentionPolicy(keep_last=2)
        return SaveOptions(mirror=mirror, incremental=True, codec="planes-zstd", retention=keep, timeout_s=timeout_s)
    return SaveOptions(timeout_s=timeout_s)


def run_on_rank(rank: int, folder: str, case: FaultCase) -> RankOutcome:
    """The job on each rank; one rank gets the fault."""
    stores = {"first": FaultyStore(FileStore(f"{folder}/run")), "second": FaultyStore(FileStore(f"{folder}/mirror"))}
    seen, timeout_s = RankOutcome(), HANG_TIMEOUT_S if case.how == FaultMode.HANG else TIMEOUT_S
    with _warnings(seen):
        saver = Saver(stores["first"], options_of(case.kind, stores["second"], timeout_s))
        _save(saver, case.kind, 1)
        faults = [StoreFault(number=case.number, how=case.how, error=ERRORS[case.error % len(ERRORS)])]
        for name, store in stores.items():
            store.arm(faults if rank == case.rank and name == case.store else [])
        for step in STEPS:
            _try_step(saver, case.kind, step, seen)
            if rank == 0:
                seen.wrong += problems(f"{folder}/run", seen, step)
        _try(seen, saver.close)
    for name, store in stores.items():
        seen.calls[name] = [verb for verb, _ in store.calls]
        if store.hit and not store.is_preempted:
            seen.call = ":".join(store.calls[case.number - 1])
            store.released.set()
            if store.is_hanging.is_set() and not store.is_over.wait(30):
                seen.wrong.append("the hanging call never returned")
    return seen


def _save(saver: Saver, kind: str, step: int) -> None:
    arguments: dict[str, Any] = {"step": step, "assets": {"tokenizer.json": b"{}"}, "training": {"step": step}}
    if kind == "sync":
        saver.save_now(make_state(step), **arguments)
    else:
        saver.save(make_state(step), **arguments).wait()


def _try_step(saver: Saver, kind: str, step: int, seen: RankOutcome) -> None:
    try:
        _save(saver, kind, step)
    except Exception as error:  # noqa: BLE001  (whatever a loop would see)
        seen.failed[step] = f"{type(error).__name__}: {error}"
    _try(seen, saver.check)


def _try(seen: RankOutcome, action: Any) -> None:
    """Run `check` or `close`, which raise a mirror's errors."""
    try:
        action()
    except Exception:  # noqa: BLE001  (whatever a loop would see)
        seen.mirror_errors += 1


@contextmanager
def _warnings(seen: RankOutcome) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.warnings.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("titan_ckpt")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def problems(url: str, seen: RankOutcome, step: int) -> list[str]:
    """Problems of the newest checkpoint after `step` was tried."""
    newest = open_checkpoint(url)
    good = [1, *(tried for tried in STEPS if tried <= step and tried not in seen.failed)]
    allowed = {max(good), step}
    if newest.step not in allowed:
        return [f"after step {step} the newest is {newest.step}, expected one of {allowed}"]
    return content_problems(url, newest.step)


def content_problems(url: str, step: int) -> list[str]:
    """What a committed step holds other than was saved."""
    state, expected = make_state(0), make_state(step)
    load(open_checkpoint(url, step=step), state, policy=LoadPolicy(extra="allow"))
    is_right = state["step"] == step and all(
        torch.equal(state[top][name], tensor) for top in ("model", "frozen") for name, tensor in expected[top].items()
    )
    return [] if is_right else [f"step {step} does not hold the values that were saved"]


def judge(folder: Path, case: FaultCase, ranks: list[RankOutcome]) -> list[str]:
    """All problems with the outcome of a case."""
    found = [text for seen in ranks for text in seen.wrong]
    failed = [set(seen.failed) for seen in ranks]
    if any(steps != failed[0] for steps in failed):
        found.append(f"ranks saw different steps fail: {failed}")
    if len(failed[0]) > 1:
        found.append(f"steps {failed[0]} failed from one fault: {ranks[0].failed}")
    if any(bool(seen.mirror_errors) != bool(ranks[0].mirror_errors) for seen in ranks):
        found.append("only some ranks got the mirror's error")
    is_reported = failed[0] or ranks[0].mirror_errors or any(seen.warnings for seen in ranks)
    if ranks[case.rank].call and not is_reported and not _is_harmless(case, ranks[case.rank].call):
        found.append("no rank reported the fault")
    for name in ["run", *(["mirror"] if case.kind == "mirror" else [])]:
        found += _final_problems(f"{folder}/{name}")
    return [f"{case} ({ranks[case.rank].call}): {text}" for text in found]


def _is_harmless(case: FaultCase, call: str) -> bool:
    """A commit whose response was lost is detected as committed."""
    return case.how == FaultMode.AFTER and call.endswith("COMMIT.json")


def _final_problems(url: str) -> list[str]:
    infos = [info for info in list_checkpoints(url) if info.state == "committed"]
    found = [f"{url}@{info.step}: {text}" for info in infos for text in content_problems(url, info.step)]
    found += [str(problem) for info in infos for problem in verify(f"{url}@{info.step}", read_data=True)]
    newest = max((info.step for info in infos), default=0)
    return found if newest == STEPS[-1] else [*found, f"{url}: the newest is {newest}, not {STEPS[-1]}"]


def count_calls(pool: RankPool, folder: Path, kind: str) -> list[RankOutcome]:
    """Run a job of that kind without a fault, to count each rank's calls on each store."""
    case = FaultCase(kind=kind, store="first", rank=0, number=0, how=FaultMode.BEFORE)
    ranks = pool.run(run_on_rank, str(folder), case)
    assert judge(folder, case, ranks) == []
    return list(ranks)


def all_cases(kind: str, counted: list[RankOutcome], hows: tuple[FaultMode, ...]) -> list[FaultCase]:
    """A case per call of the first two saves, on every rank and store, in each mode, with the errors in turn."""
    return [
        FaultCase(kind=kind, store=store, rank=rank, number=number, how=how, error=number)
        for rank, seen in enumerate(counted)
        for store, calls in seen.calls.items()
        for number, verb in enumerate(calls[: len(calls) // 2], start=1)
        for how in hows
        if how != FaultMode.TORN or verb == "write"
    ]


def run_case(pool: RankPool, folder: Path, case: FaultCase) -> tuple[list[str], RankOutcome, float]:
    """Problems, what the faulty rank saw, and seconds."""
    started = time.monotonic()
    ranks = pool.run(run_on_rank, str(folder), case)
    return judge(folder, case, ranks), ranks[case.rank], time.monotonic() - started
