"""One rank that fails inside a save, at every function that a save calls: what each rank saw, and what remains in the store.

A case saves a step, arms one function of one rank to raise at its next call, and saves three more. `judge` lists violations of:

  no rank waits longer than `MOST_S` (of `lived_s`) for a save; a step fails on all ranks or on none, and at most one step fails
  whatever is committed has the right values, and the last step is committed

The functions are found, not listed: every function and method of the rooms in `ROOMS` that a rank calls in a job without a fault.
"""

from __future__ import annotations

import inspect
import pkgutil
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.errors import UsageError
from titan_ckpt.saving.saver import Saver
from titan_ckpt.store.local import FileStore
from tools.faults.cases import content_problems, make_state, options_of
from tools.faults.lived_time import lived_s
from tools.faults.store import FaultyStore
from tools.rank_pool import RankPool

ROOMS = ("titan_ckpt.saving", "titan_ckpt.state", "titan_ckpt.format")
NOT_HOOKED = ("titan_ckpt.state.exchange",)  # the wire between the ranks, and what reports a failure over it
# A rank that raises at these did not call `save`, or waits for it no longer: the others cannot know. They are the caller's own.
NOT_BEGUN = (
    "saver:Saver.save", "saver:Saver.save_now", "saver:Saver._begin", "turns:", "options:SaveRequest.__init__",
    "options:SaveHandle.wait", "pace:Pace.lift", "saver:Saver.metrics", "Saver.close", "Saver.check",
    "Mirror.close", "Mirror.check",
)  # fmt: skip
# What hands a fault on, and what resets the flags for that afterwards: one fault in them is the second of a save.
HANDS_ON = ("saver:Saver._run", "Saver._end", "Agreement.end", "Committer.end", "Agreement.finish", "Committer.finish")
NOT_A_SAVE = (*NOT_BEGUN, *HANDS_ON)
ERRORS: tuple[type[BaseException], ...] = (MemoryError, UsageError, KeyboardInterrupt, RuntimeError)
STEPS = (2, 3, 4)
MOST_S, TIMEOUT_S = 10.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRankCase:
    """`point` is `module:function` or `module:Class.method`; empty to count the points that `rank` passes."""

    kind: str
    rank: int
    point: str = ""
    error: int = 0


@dataclass(slots=True)
class Seen:
    """Observations of one rank: the points it passed, which steps failed, how long each save took."""

    passed: list[str] = field(default_factory=list)
    is_hit: bool = False
    failed: dict[int, str] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)


def run_on_rank(rank: int, folder: str, case: OneRankCase) -> Seen:
    """The job on each rank; one rank gets the fault."""
    seen = Seen()
    options = options_of(case.kind, FaultyStore(FileStore(f"{folder}/mirror")), TIMEOUT_S)
    saver = Saver(f"{folder}/run", options)
    _save(saver, case.kind, 1)
    with _hooked(case, seen) if rank == case.rank else _nothing():
        for step in STEPS:
            started = lived_s()
            try:
                _save(saver, case.kind, step)
            except BaseException as error:  # noqa: BLE001  (KeyboardInterrupt is one of the faults)
                seen.failed[step] = f"{type(error).__name__}: {str(error)[:300]}"
            seen.seconds[step] = lived_s() - started
        started = lived_s()
        for what in (saver.check, saver.close):
            try:
                what()
            except BaseException as error:  # noqa: BLE001  (a mirror's errors)
                seen.late.append(f"{type(error).__name__}: {str(error)[:300]}")
        seen.seconds[0] = lived_s() - started
    return seen


def _save(saver: Saver, kind: str, step: int) -> None:
    arguments: dict[str, Any] = {"step": step, "assets": {"tokenizer.json": b"{}"}, "training": {"step": step}}
    state = make_state(step)
    if step >= STEPS[1]:
        state["late"] = {"shape": make_state(step)["model"]["w0"]}  # another plan, so that the ranks divide it anew
    if kind == "sync":
        saver.save_now(state, **arguments)
    else:
        saver.save(state, **arguments).wait()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _hooked(case: OneRankCase, seen: Seen) -> Iterator[None]:
    """Make the case's function raise at its first call, or record every function that is called."""
    undo: list[Callable[[], None]] = []
    lock = threading.Lock()

    def called(point: str) -> None:
        with lock:
            if not case.point and point not in seen.passed:
                seen.passed.append(point)
            if point != case.point or seen.is_hit:
                return
            seen.is_hit = True
        raise ERRORS[case.error % len(ERRORS)](f"injected at {point}")

    for point, owner, name, function in _functions():
        if case.point in ("", point):
            undo += _replace(owner, name, function, _wrapped(point, function, called))
    try:
        yield
    finally:
        for action in undo:
            action()


def _wrapped(point: str, function: FunctionType, called: Callable[[str], None]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        called(point)
        return function(*arguments, **named)

    return wrapper


def _replace(owner: Any, name: str, function: FunctionType, wrapper: Any) -> list[Callable[[], None]]:
    """Put `wrapper` wherever `function` is bound: in its class, or in every module that imported it."""
    homes = [owner]
    if isinstance(owner, ModuleType):
        homes = [
            m for n, m in list(sys.modules.items()) if n.startswith("titan_ckpt") and vars(m).get(name) is function
        ]
    undo: list[Callable[[], None]] = []
    for home in homes:
        old = vars(home)[name]
        setattr(home, name, type(old)(wrapper) if isinstance(old, staticmethod | classmethod) else wrapper)
        undo.append(lambda home=home, old=old: setattr(home, name, old))  # type: ignore[misc]
    return undo


def _functions() -> Iterator[tuple[str, Any, str, FunctionType]]:
    """(point, owner, name, function) of every function and method that the rooms define."""
    for module in _modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                yield f"{module.__name__}:{name}", module, name, value
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for method, found in list(vars(value).items()):
                    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
                    if isinstance(function, FunctionType) and (not method.startswith("__") or method == "__init__"):
                        yield f"{module.__name__}:{name}.{method}", value, method, function


def _modules() -> Iterator[ModuleType]:
    for room in ROOMS:
        package = import_module(room)
        for found in pkgutil.iter_modules(package.__path__, f"{room}."):
            if found.name not in NOT_HOOKED:
                yield import_module(found.name)


def points_of(pool: RankPool, folder: Path, kind: str, rank: int) -> list[str]:
    """Every point that `rank` passes in a job without a fault, in order of the first call."""
    seen = pool.run(run_on_rank, str(folder), OneRankCase(kind=kind, rank=rank))
    assert all(not each.failed and not each.late for each in seen), seen
    return [point for point in seen[rank].passed if not any(name in point for name in NOT_A_SAVE)]


def run_case(pool: RankPool, folder: Path, case: OneRankCase) -> tuple[list[str], Seen, float]:
    """Problems, what the faulty rank saw, and the longest save in seconds."""
    ranks: list[Seen] = pool.run(run_on_rank, str(folder), case)
    longest = max(seconds for seen in ranks for seconds in seen.seconds.values())
    return [f"{case}: {text}" for text in judge(folder, case, ranks)], ranks[case.rank], longest


def campaign(
    folder: Path, kinds: tuple[str, ...], *, num_ranks: int, sample: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Every point of every kind of save on ranks 0 and 1, or `sample` each: the number of cases, of faults met, all problems."""
    facts: dict[str, Any] = {"ranks": num_ranks, "cases": 0, "met": 0, "longest_s": 0.0, "by_kind": {}, "problems": []}
    rng = random.Random(seed)
    with RankPool(num_ranks) as pool:
        for kind, rank in product(kinds, (0, 1)):
            points = list(enumerate(points_of(pool, folder / f"{kind}-{rank}", kind, rank)))
            for number, point in points if sample is None else rng.sample(points, min(sample, len(points))):
                case = OneRankCase(kind=kind, rank=rank, point=point, error=number)
                found, seen, longest = run_case(pool, folder / f"{kind}-{rank}-{number}", case)
                facts["cases"] += 1
                facts["by_kind"][kind] = facts["by_kind"].get(kind, 0) + 1
                facts["met"] += seen.is_hit
                facts["longest_s"] = max(facts["longest_s"], round(longest, 1))
                facts["problems"] += found
                sys.stderr.write("".join(f"{text}\n" for text in found))
    return facts


def judge(folder: Path, case: OneRankCase, ranks: list[Seen]) -> list[str]:
    """All problems with the outcome of a case."""
    found = [
        f"rank {rank} was in the save of step {step} for {seconds:.1f} s"
        for rank, seen in enumerate(ranks)
        for step, seconds in seen.seconds.items()
        if seconds > MOST_S
    ]
    failed = [set(seen.failed) for seen in ranks]
    if any(steps != failed[0] for steps in failed):
        found.append(f"ranks saw different steps fail: {[seen.failed for seen in ranks]}")
    if any(len(steps) > 1 for steps in failed):
        found.append(f"one fault failed several steps: {[seen.failed for seen in ranks]}")
    if any(bool(seen.late) != bool(ranks[0].late) for seen in ranks):
        found.append(f"only some ranks got the mirror's error: {[seen.late for seen in ranks]}")
    committed = [info.step for info in list_checkpoints(f"{folder}/run") if info.state == "committed"]
    if STEPS[-1] not in committed:
        found.append(f"the last step is not committed; {committed} are")
    for step in committed:
        if case.kind != "retention" or step == STEPS[-1]:
            found += content_problems(f"{folder}/run", step)
    return found
