"""Reliability campaigns on the checkpoint core: kills during saves, store faults, damaged files.

    python -m scripts.faults --kills 200                 SIGKILL a real job at random moments of its saves, local disk
    python -m scripts.faults --kills 100 --s3            the same on a real S3 server, started here
    python -m scripts.faults --kills 100 --s3 --client s3fs    the same through s3fs
    python -m scripts.faults --matrix                    a fault at every store call of every rank (tools/faults/cases.py)
    python -m scripts.faults --random 5000               saves on a store that fails at random (tools/faults/random_saves.py)
    python -m scripts.faults --tiers 1000                jobs whose copies to a second tier fail (tools/faults/tiers.py)
    python -m scripts.faults --one-rank                  one rank fails in every function of a save (tools/faults/one_rank.py)
    python -m scripts.faults --damage 200                damage of every kind to every kind of file (tools/faults/damage.py)
    python -m scripts.faults --power-cuts 1000           what power cuts may leave of a run (tools/faults/power.py)

After every kill the newest committed checkpoint must be the last known one or a later one, with correct bytes, and the next job
resumes from it. Prints one JSON line; exit code 1 if anything was lost or wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.demo.s3_server import running_server
from titan_ckpt.errors import NotCommittedError
from titan_ckpt.format.codec import CODECS
from titan_ckpt.loading.load import load, open_checkpoint
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store.clients.options import StoreSettings, settings_of_command
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.faults.cases import KINDS, FaultCase, RankOutcome, all_cases, count_calls, run_case
from tools.faults.damage import damage_table
from tools.faults.one_rank import campaign as one_rank_campaign
from tools.faults.power_cases import run_cuts
from tools.faults.random_saves import describe, random_runs
from tools.faults.store import FaultMode
from tools.faults.tiers import tier_runs
from tools.rank_pool import RankPool


@dataclass(slots=True)
class Outcome:
    """Results of a campaign; `lost` and `wrong` must be 0. `partial` counts steps left without a commit, `during_save` the kills
    between the start of a save and its commit (the others came right after a commit)."""

    kills: int = 0
    during_save: int = 0
    committed: int = 0
    partial: int = 0
    lost: int = 0
    wrong: int = 0
    longest_save_s: float = 0.0
    seconds: float = 0.0


def make_state(step: int) -> dict[str, Any]:
    """About 9 MB of tensors whose elements equal the step, and one tensor that never changes."""
    changing = {f"w{n}": torch.full((50_000 + n,), float(step)) for n in range(40)}
    return {"model": changing, "frozen": torch.arange(200_000.0), "step": step}


def run_job(url: str, options: SaveOptions, report: Callable[[int], object]) -> None:
    """A training job: resume, then save for ever. Calls `report` with -step when a save begins, step when it is committed."""
    with Saver(url, options) as saver:
        step = newest_step(url)
        while True:
            step += 1
            report(-step)
            saver.save(make_state(step), step=step).wait()
            report(step)


def newest_step(url: str) -> int:
    """The newest committed step, 0 if there is none."""
    try:
        return open_checkpoint(url, on_damage="error").step
    except NotCommittedError:
        return 0


def kill_once(url: str, options: SaveOptions, rng: random.Random, outcome: Outcome) -> int:
    """Fork a job and kill it in one of its first three saves, after a random share of up to 1.2 times the longest save so far.

    Returns the last step that it reported as committed (0: none).
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            run_job(url, options, writer.send)
        except BaseException:  # noqa: BLE001 - the child has no caller
            traceback.print_exc()
        finally:
            os._exit(1)
    writer.close()
    committed = 0
    for _ in range(rng.randint(0, 2)):
        committed = _watch_save(reader, outcome)
    begun = reader.recv()
    assert begun < 0, begun
    time.sleep(rng.uniform(0.0, 1.2 * outcome.longest_save_s))  # when to kill, not a synchronisation
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with reader:
        rest = _drain(reader)
    outcome.during_save += not rest or rest[-1] < 0
    return max([committed, *rest])


def _watch_save(reader: Connection[int, int], outcome: Outcome) -> int:
    """Wait for one save, record its duration, return its step."""
    begun, started = reader.recv(), time.monotonic()
    committed = reader.recv()
    assert committed == -begun, (begun, committed)
    outcome.longest_save_s = max(outcome.longest_save_s, time.monotonic() - started)
    return committed


def _drain(reader: Connection[int, int]) -> list[int]:
    rest = []
    try:
        while True:
            rest.append(reader.recv())
    except EOFError:
        return rest


def check(url: str, known: int, outcome: Outcome) -> int:
    """Check what the kill left; return the newest step. Runs in a child process, so that this one stays safe to fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, json.dumps(_look(url)).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        seen = json.loads(answer.read())
    outcome.lost += seen["newest"] < known
    outcome.wrong += seen["problems"]
    outcome.committed, outcome.partial = max(outcome.committed, seen["newest"]), max(outcome.partial, seen["partial"])
    return int(seen["newest"])


def _look(url: str) -> dict[str, int]:
    newest, problems = newest_step(url), 0
    if newest:
        state: dict[str, Any] = {"model": {k: torch.zeros_like(t) for k, t in make_state(0)["model"].items()}}
        state |= {"frozen": torch.zeros(200_000), "step": 0}
        load(url, state)
        expected = make_state(newest)
        is_right = all(torch.equal(state["model"][k], t) for k, t in expected["model"].items())
        is_right = is_right and torch.equal(state["frozen"], expected["frozen"]) and state["step"] == newest
        problems = int(not is_right) + len(verify(f"{url}@{newest}", read_data=True))
    partial = sum(info.state == "partial" for info in list_checkpoints(url))
    return {"newest": newest, "problems": problems, "partial": partial}


def campaign(url: str, kills: int, *, seed: int) -> Outcome:
    """Kill `kills` jobs in turn on one run with retention: plain and incremental saves, by a thread and by a process."""
    rng, outcome, started, known = random.Random(seed), Outcome(), time.monotonic(), 0
    for number in range(kills):
        options = SaveOptions(
            incremental=number % 2 == 1, upload_process=number % 4 >= 2, retention=RetentionPolicy(keep_last=3)
        )
        committed = kill_once(url, options, rng, outcome)
        known = max(check(url, max(known, committed), outcome), known)
        outcome.kills += 1
        sys.stderr.write(f"\rkill {number + 1}/{kills}: step {known}, lost {outcome.lost}, wrong {outcome.wrong} ")
    sys.stderr.write("\n")
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


@dataclass(slots=True)
class MatrixOutcome:
    """Results of the fault matrix; `wrong` must be 0. `hit` cases reached their call, `failed` ones failed a save or mirror."""

    ranks: int
    cases: int = 0
    hit: int = 0
    failed: int = 0
    wrong: int = 0
    seconds: float = 0.0
    by_kind: dict[str, int] = field(default_factory=dict)


def matrix(folder: Path, hows: tuple[FaultMode, ...], *, num_ranks: int, num_pools: int) -> MatrixOutcome:
    """Run every case of every kind, `num_pools` at once, since hanging jobs only wait."""
    outcome, started = MatrixOutcome(ranks=num_ranks), time.monotonic()
    with ExitStack() as stack:
        pools: queue.SimpleQueue[RankPool] = queue.SimpleQueue()
        held = [stack.enter_context(RankPool(num_ranks)) for _ in range(num_pools)]
        cases = [
            case
            for kind in KINDS
            for case in all_cases(kind, count_calls(held[0], folder / f"count-{kind}", kind), hows)
        ]
        for pool in held:
            pools.put(pool)
        with ThreadPoolExecutor(num_pools) as threads:
            for done in threads.map(
                lambda job: _run_pooled(pools, folder / f"case-{job[0]}", job[1]), enumerate(cases)
            ):
                _add(outcome, *done)
                sys.stderr.write(f"\rcase {outcome.cases}/{len(cases)}: {outcome.wrong} wrong ")
    sys.stderr.write("\n")
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def damage(folder: Path, flips: int, *, seed: int) -> int:
    """Print the damage table, one JSON line per row; 1 if any damage was missed or loaded."""
    is_good = True
    for codec in CODECS:
        for row in damage_table(folder / codec, seed=seed, flips=flips, codec=codec):
            sys.stdout.write(json.dumps({"codec": codec, **asdict(row)}) + "\n")
            is_good = is_good and row.found == row.named == row.cases and not row.wrong
    return 0 if is_good else 1


def random_saves(folder: Path, saves: int, *, seed: int) -> int:
    """Print the totals of `saves` saves over a store whose calls fail at random; 1 if anything went wrong."""
    return _totals(folder, random_runs(folder, saves, seed=seed), describe, random=saves, seed=seed)


def tiers(folder: Path, runs: int, *, seed: int) -> int:
    """Print the totals of `runs` runs of jobs with two tiers; 1 if anything went wrong."""
    logging.getLogger("titan_ckpt").setLevel(logging.CRITICAL + 1)
    return _totals(folder, tier_runs(folder, runs, seed=seed), asdict, tiers=runs, seed=seed)


def _totals(folder: Path, outcomes: Iterable[Any], describe_it: Callable[[Any], dict[str, Any]], **asked: int) -> int:
    """Go through the outcomes of a campaign, each the totals so far, and print the last ones; 1 if anything went wrong."""
    outcome, started = None, time.monotonic()
    for outcome in outcomes:
        sys.stderr.write(f"\r{outcome.saves} saves, {len(outcome.wrong)} wrong ")
        shutil.rmtree(folder, ignore_errors=True)
    assert outcome is not None, "nothing was asked for"
    facts = {**asked, **describe_it(outcome), "seconds": round(time.monotonic() - started, 1)}
    sys.stdout.write(json.dumps(facts) + "\n")
    return 1 if outcome.wrong else 0


def power_cuts(folder: Path, cuts: int, *, seed: int) -> int:
    """Print the outcome of `cuts` power cuts; 1 if anything promised was lost."""
    started = time.monotonic()
    outcome = run_cuts(folder, cuts, seed=seed)
    seconds = round(time.monotonic() - started, 1)
    shown = {**asdict(outcome), "problems": outcome.problems[:20], "num_problems": len(outcome.problems)}
    sys.stdout.write(json.dumps({"power_cuts": cuts, **shown, "seconds": seconds}) + "\n")
    return 1 if outcome.problems else 0


def _run_pooled(
    pools: queue.SimpleQueue[RankPool], folder: Path, case: FaultCase
) -> tuple[FaultCase, list[str], RankOutcome]:
    pool = pools.get()
    try:
        found, seen, _ = run_case(pool, folder, case)
    finally:
        pools.put(pool)
        shutil.rmtree(folder, ignore_errors=True)
    return case, found, seen


def _add(outcome: MatrixOutcome, case: FaultCase, found: list[str], seen: RankOutcome) -> None:
    outcome.cases += 1
    outcome.hit += bool(seen.call)
    outcome.failed += bool(seen.failed or seen.mirror_errors)
    outcome.wrong += bool(found)
    outcome.by_kind[case.kind] = outcome.by_kind.get(case.kind, 0) + 1
    for text in found:
        sys.stderr.write(f"\n{text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--client", choices=("botocore", "s3fs"), default="botocore", help="which serves --s3")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument(
        "--random", type=int, metavar="N", help="save N times over an fsspec store that fails at random"
    )
    parser.add_argument("--tiers", type=int, metavar="N", help="N runs of jobs whose copies to a second tier fail")
    parser.add_argument("--one-rank", action="store_true", help="one rank fails in every function of a save in turn")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds of save --one-rank tries")
    parser.add_argument("--sample", type=int, metavar="N", help="only N functions for each kind and rank in --one-rank")
    parser.add_argument("--damage", type=int, metavar="N", help="flip and truncate each file N times, at random places")
    parser.add_argument("--power-cuts", type=int, metavar="N", help="cut the power of modelled disks N times")
    parser.add_argument("--hows", default="before,after,torn,hang", help="which faults the matrix injects")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pools", type=int, default=4, help="jobs at once in the matrix")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            return random_saves(Path(folder, "runs"), arguments.random, seed=arguments.seed)
        if arguments.tiers:
            return tiers(Path(folder, "runs"), arguments.tiers, seed=arguments.seed)
        if arguments.damage:
            return damage(Path(folder), arguments.damage, seed=arguments.seed)
        if arguments.power_cuts:
            return power_cuts(Path(folder), arguments.power_cuts, seed=arguments.seed)
        if arguments.one_rank:
            kinds = tuple(arguments.kinds.split(","))
            facts = one_rank_campaign(
                Path(folder), kinds, num_ranks=arguments.ranks, sample=arguments.sample, seed=arguments.seed
            )
            sys.stdout.write(json.dumps({"one_rank": True, **facts}) + "\n")
            return 1 if facts["problems"] else 0
        if arguments.matrix:
            hows = tuple(FaultMode(how) for how in arguments.hows.split(","))
            seen = matrix(Path(folder), hows, num_ranks=arguments.ranks, num_pools=arguments.pools)
            sys.stdout.write(json.dumps({"matrix": arguments.hows, **asdict(seen)}) + "\n")
            return 1 if seen.wrong else 0
        outcome = kill_jobs(
            folder, arguments.kills, seed=arguments.seed, client=arguments.client if arguments.s3 else ""
        )
    store = f"s3 by {arguments.client}" if arguments.s3 else "local"
    sys.stdout.write(json.dumps({"store": store, **asdict(outcome)}) + "\n")
    return 1 if outcome.lost or outcome.wrong else 0


def kill_jobs(folder: str, kills: int, *, seed: int, client: str) -> Outcome:
    """The campaign of kills in `folder`, or, with a `client`, on an S3 server through it."""
    if not client:
        return campaign(f"{folder}/run", kills, seed=seed)
    with running_server(Path(folder), ["faults"]) as server, settings_of_command(StoreSettings(client=client)):
        os.environ.update(server.environment)
        return campaign("s3://faults/run", kills, seed=seed)


if __name__ == "__main__":
    sys.exit(main())
