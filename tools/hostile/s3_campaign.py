"""The part `server` of scripts/hostile.py: every call and every job against every shape of wrong answer, by seed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from tools.hostile.outcome import Outcome
from tools.hostile.s3_calls import CALLS, Seen, operations_of, run_case, small_parts
from tools.hostile.s3_jobs import hostile_jobs
from tools.hostile.s3_server import HostileS3, Rule, always, once
from tools.hostile.s3_shapes import SHAPES, Shape

SHARE_OF_CALLS = 0.6
# Slow answers cost a deadline each; among the jobs they take turns with twenty others.
SHARE_OF_SLOW = 0.05
# Listings of invented keys, which show that they are wrong only by not ending.
INVENTED = [name for name in SHAPES if name.startswith("pages ")]


def run_server(seed: int, seconds: float) -> Outcome:
    """Every call in every shape once, or as many as fit in the first part of the time; then jobs until its end."""
    outcome, rng, started = Outcome(part="server"), random.Random(seed), time.monotonic()
    logging.disable(logging.CRITICAL)
    try:
        _calls(outcome, rng, lambda: time.monotonic() - started < SHARE_OF_CALLS * seconds)
        _jobs(outcome, rng, lambda: time.monotonic() - started < seconds)
    finally:
        logging.disable(logging.NOTSET)
    return outcome


def _calls(outcome: Outcome, rng: random.Random, goes_on: Callable[[], bool]) -> None:
    with small_parts(), HostileS3() as server:
        cases = [
            (call, shape, operation, is_once)
            for call in CALLS
            for operation in operations_of(server, call)
            for shape in SHAPES.values()
            if shape.fits_any([operation])
            for is_once in ((False,) if shape.name in INVENTED else (False, True))
        ]
        rng.shuffle(cases)
        outcome.counts["shapes"], outcome.counts["calls x operations x shapes"] = len(SHAPES), len(cases)
        for call, shape, operation, is_once in cases:
            if not goes_on():
                return
            rule = _first(shape, operation) if is_once else always(shape, operation)
            seen = run_case(server, call, shape, rule=rule)
            _add(outcome, "call", f"{call.name}: {shape.name}, {operation}, {'once' if is_once else 'always'}", seen)


def _jobs(outcome: Outcome, rng: random.Random, goes_on: Callable[[], bool]) -> None:
    fast = [shape for shape in SHAPES.values() if not shape.is_slow]
    slow = [shape for shape in SHAPES.values() if shape.is_slow]
    with hostile_jobs() as jobs:
        requests = {job.name: jobs.count(job) for job in jobs.all}
        while goes_on():
            job, shape = rng.choice(jobs.all), rng.choice(slow if rng.random() < SHARE_OF_SLOW else fast)
            hows = ["always"] if shape.name in INVENTED else ["once", "once", "from", "always"]
            number, how = rng.randint(1, requests[job.name]), rng.choice(hows)
            rule = {"once": once(shape, number), "from": _from(shape, number), "always": always(shape)}[how]
            seen = jobs.run(job, rule)
            _add(outcome, "job", f"{job.name}: {shape.name}, {how} {number}", seen)


def _first(shape: Shape, operation: str) -> Rule:
    """The first answer to `operation` in `shape`."""
    left = [shape]
    return lambda request, _: left.pop() if left and request.operation == operation else None


def _from(shape: Shape, number: int) -> Rule:
    """All answers from request `number` on."""
    return lambda _, seen: shape if seen >= number else None


def _add(outcome: Outcome, kind: str, case: str, seen: Seen) -> None:
    outcome.cases += 1
    outcome.counts[f"{kind}: {seen.outcome}"] += 1
    slowest = f"{kind}: slowest, ms"
    outcome.counts[slowest] = max(outcome.counts[slowest], int(1000 * seen.seconds))
    if seen.problem:
        outcome.failures.append(f"{case}: {seen.problem}")
