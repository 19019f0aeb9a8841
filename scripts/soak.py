"""Train, kill, resume on other meshes, reshard, copy, prune and verify in random order, for as long as you like.

    python -m scripts.soak --minutes 60 --seed 0        results go to docs/reliability.md, and as JSON to --json FILE
    python -m scripts.soak --publish FILE               write the section from such a file

Real ranks over gloo, a real S3 server, and between them a proxy that answers 503, resets, loses, truncates, delays and hangs
requests. After every action the ledger (tools/soak/ledger.py) reads the server directly: no committed checkpoint may be
lost or changed, and losses after a resume must be those of an uninterrupted run. Exit code 1 if anything was lost or wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from scripts.soak_report import publish
from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store
from tools.faults.proxy import FaultyProxy
from tools.paths import DEBUG_CONFIG
from tools.soak.jobs import JobResult, Kill, TrainingLog, Victim, read_training_log, run_job
from tools.soak.ledger import Ledger, LedgerCounts
from tools.soak.weather import CALM, Climate, Weather, draw_weather

BUCKET = "soak"
MESHES = (
    "1", "dp_shard=2", "dp_shard=3", "dp_replicate=2", "tp=2", "cp=2", "pp=2", "dp_shard=2,tp=2", "pp=2,dp_shard=2",
    "dp_replicate=2,dp_shard=2",
)  # fmt: skip
# Learning rate 3e-4: at 3e-3 rounding alone changes the loss of an uninterrupted run by 1e-2 within 100 steps, at 3e-4 by 1e-7.
GENERATION_STEPS = 240  # length of the uninterrupted run that each generation is compared with
COPIES = 3  # resharded and copied runs that are kept
VICTIMS = tuple(Victim)
ACTIONS = {"train": 10, "reshard": 3, "fork": 2, "copy": 2, "prune": 2, "verify": 2}


@dataclass(slots=True)
class SoakRecord:
    """Actions, faults and findings of a soak."""

    seed: int
    minutes: float = 0.0
    actions: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    weather: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    generations: int = 0
    counts: LedgerCounts = field(default_factory=LedgerCounts)
    problems: list[str] = field(default_factory=list)


class Soak:
    """One soak: `rng` chooses actions, jobs reach the server through the proxy, the ledger reads it directly."""

    def __init__(self, folder: Path, server: Server, proxy: FaultyProxy, seed: int) -> None:
        self.folder, self.proxy, self.rng, self.seen = folder, proxy, random.Random(seed), SoakRecord(seed=seed)
        self.climate = Climate(seed)
        proxy.rule = self.climate
        self.environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint, "OMP_NUM_THREADS": "1"}
        self.ledger = Ledger(open_direct=_opener(server), complain=self._complain, counts=self.seen.counts)
        self.numbers = 0
        self.seed, self.url = seed, ""
        self.copies: list[tuple[str, str]] = []  # (URL, mesh) of runs made by reshard and cp

    def run(self, minutes: float) -> SoakRecord:
        """Act until the time is up."""
        started, actions = time.monotonic(), {name: getattr(self, f"_{name}") for name in ACTIONS}
        self._begin_generation()
        while time.monotonic() < started + 60 * minutes:
            name = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            if self.ledger.newest(self.url) >= GENERATION_STEPS:
                self._begin_generation()
            elif self.ledger.newest(self.url) and name != "train":
                actions[name]()
            else:
                self._train()
            self._audit()
            self._count(started)
        return self.seen

    def _begin_generation(self) -> None:
        """Start a run with a new seed, and train its uninterrupted reference."""
        for url in [*self.ledger.runs]:
            self.ledger.forget(url)
        self.copies.clear()
        self.seen.generations += 1
        self.seed = 1000 * self.seen.seed + self.seen.generations
        self.url = f"s3://{BUCKET}/run-{self.seen.generations}"
        self.climate.set(CALM)
        name, folder = self._name("reference")
        sets = self._sets(folder, GENERATION_STEPS)
        ended = run_job(_titan("train", DEBUG_CONFIG, *sets), self.environment, self.folder / name, self.rng)
        losses = read_training_log(folder).losses
        if not ended.is_done or len(losses) != GENERATION_STEPS:
            raise RuntimeError(f"the uninterrupted run failed:\n{ended.text[-3000:]}")
        self.ledger.references[self.seed] = [losses[step] for step in sorted(losses)]

    # Actions

    def _train(self) -> None:
        """Train some steps on a random mesh; the job may be killed."""
        mesh, keep_last = self.rng.choice(MESHES), self.rng.randint(2, 5)
        start = self.ledger.newest(self.url)
        values = self.ledger.values(self.url, start)
        steps = min(GENERATION_STEPS, start + self.rng.randint(8, 40))
        more = [f"save.keep_last={keep_last}", f"save.incremental={_toml(self.rng.random() < 0.4)}"]
        more += [f'save.codec="{self.rng.choice(("raw", "planes-zstd"))}"']
        _, log = self._train_job("train", self.url, mesh, steps, more, may_be_killed=True)
        promised = [log.committed] if log.committed else []
        self.ledger.look(self.url, promised=promised, kept=lambda steps: set(sorted(steps)[-keep_last:]))
        self._judge(self.url, mesh, start, values, log)

    def _fork(self) -> None:
        """Start a new run from a resharded or copied checkpoint."""
        if not self.copies:
            self._reshard()
            return
        source, mesh = self.rng.choice(self.copies)
        url, start = f"s3://{BUCKET}/fork-{self.numbers}", self.ledger.newest(source)
        steps = min(GENERATION_STEPS, start + 6)
        values = self.ledger.values(source, start)
        ended, log = self._train_job("fork", url, mesh, steps, [f"resume.from={source}"], may_be_killed=False)
        self.ledger.look(url, promised=[log.committed] if log.committed else [])
        if log.start is not None:
            self.ledger.check_losses(self.seed, mesh, url, start, values, log.losses)
        if ended.is_done and self.ledger.newest(url) != steps:
            self._complain(f"{url}: ended at step {steps}, but {self.ledger.newest(url)} is the newest commit")
        self.ledger.forget(url)

    def _reshard(self) -> None:
        mesh = self.rng.choice(MESHES)
        copy, source = self._new_copy(mesh), self._any_checkpoint()
        command = _titan("reshard", source, copy, "--mesh", mesh, "--memory", "128MB")
        if self.rng.random() < 0.3:
            command = _torchrun(2) + command[1:]
        self._make_copy("reshard", command, source)

    def _copy(self) -> None:
        copy, source = self._new_copy(self.rng.choice(MESHES)), self._any_checkpoint()
        self._make_copy("copy", _titan("cp", source, copy), source)

    def _prune(self) -> None:
        last, every = self.rng.randint(1, 3), self.rng.choice((5, 7, 10))
        command = _titan("prune", self.url, "--keep-last", str(last), "--keep-every", str(every), "--yes")
        if self.rng.random() < 0.3:
            command += ["--incomplete", "--older-than", "1s"]

        def kept(steps: set[int]) -> set[int]:
            return {*sorted(steps)[-last:], *(step for step in steps if step % every == 0)}

        promise = kept(set(self.ledger.runs[self.url]))
        is_done = self._until_done("prune", command, after_each=lambda: self.ledger.look(self.url, kept=kept))
        if is_done and set(self.ledger.runs[self.url]) != promise:
            self._complain(f"prune kept {sorted(self.ledger.runs[self.url])} instead of {sorted(promise)}")

    def _verify(self) -> None:
        command = _titan("verify", self._any_checkpoint(), "--data")
        self._until_done("verify", command)

    # What actions share

    def _train_job(
        self, action: str, url: str, mesh: str, steps: int, more: list[str], *, may_be_killed: bool
    ) -> tuple[JobResult, TrainingLog]:
        name, folder = self._name(action)
        since_s, world, every = time.time(), MeshSpec.parse(mesh).world_size, self.rng.choice((3, 4, 5))
        sets = self._sets(folder, steps, f"save.url={url}", f"save.every={every}", "save.timeout_s=100", *more)
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            sets += ["--set", f"mesh.{axis}={MeshSpec.parse(mesh).degree(axis)}"]
        command = _titan("train", DEBUG_CONFIG, *sets)
        if world > 1 and self.rng.random() < 0.5:
            command = _torchrun(world) + command[1:]
        kill = self._draw_kill(folder, world, since_s) if may_be_killed and self.rng.random() < 0.6 else None
        ended = self._act(action, name, command, kill=kill)
        log = read_training_log(folder, since_s=since_s)
        self.seen.steps += len(log.losses)
        return ended, log

    def _draw_kill(self, folder: Path, world: int, since_s: float) -> Kill:
        if self.rng.random() < 0.25:
            return Kill(victim=Victim.ALL, after_s=self.rng.uniform(0.0, 12.0))  # at any point of the job
        first = self.rng.randint(1, 25)
        moment = lambda: len(read_training_log(folder, since_s=since_s).losses) >= first
        victim = self.rng.choice(VICTIMS) if world > 1 else Victim.ALL
        return Kill(victim=victim, moment=moment, after_s=self.rng.uniform(0.0, 1.0))

    def _make_copy(self, action: str, command: list[str], source: str) -> None:
        """Make the newest of `copies`, retrying until it is done; then compare its values with the source."""
        url, _ = self.copies[-1]
        run, _, step = source.rpartition("@")
        is_done = self._until_done(action, command, after_each=lambda: self.ledger.look(url))
        made = self.ledger.runs.get(url, {}).get(int(step))
        if is_done and (made is None or made.values != self.ledger.values(run, int(step))):
            self._complain(f"{action} {source} -> {url} reported success: {made}")
        if made is None:
            self.copies.pop()

    def _until_done(self, action: str, command: list[str], after_each: Callable[[], object] = lambda: None) -> bool:
        """Run under random weather and perhaps a kill, where it may fail; then retry under calm, where it must succeed."""
        kill = Kill(victim=Victim.ALL, after_s=self.rng.uniform(0.5, 8.0)) if self.rng.random() < 0.4 else None
        ended = self._act(action, self._name(action)[0], command, kill=kill)
        after_each()
        if not ended.is_done:
            ended = self._act(f"{action} again", self._name(action)[0], command, weather=CALM)
            after_each()
            if not ended.is_done:
                self._complain(f"{' '.join(command[1:])} fails without an injected fault:\n{ended.text[-2000:]}")
        return ended.is_done

    def _act(
        self, action: str, name: str, command: list[str], *, kill: Kill | None = None, weather: Weather | None = None
    ) -> JobResult:
        chosen = weather or draw_weather(self.rng)
        self.climate.set(chosen)
        ended = run_job(command, self.environment, self.folder / name, self.rng, kill=kill)
        self.climate.set(CALM)
        self.seen.actions[action] += 1
        self.seen.weather[chosen.name] += 1
        self.seen.kills[str(kill)] += ended.was_killed
        self.seen.failed[action] += not ended.is_done and not ended.was_killed
        _log(f"{name:<16} {chosen.name:<7} {'killed' if ended.was_killed else ended.code}")
        if ended.problem and not _is_torchruns_exit_code(command, ended):
            self._complain(f"{name} under {chosen.name}: {ended.problem}\n{ended.text[-3000:]}")
        return ended

    def _judge(self, url: str, mesh: str, start: int, values: str, log: TrainingLog) -> None:
        if log.start is None:
            return
        if log.start != start:
            self._complain(f"{url} on {mesh} resumed from step {log.start}, {start} was the newest committed")
        else:
            self.ledger.check_losses(self.seed, mesh, url, start, values, log.losses)

    def _audit(self) -> None:
        """Check every run, also those that no action touched."""
        for url in [*self.ledger.runs]:
            self.ledger.look(url)

    def _any_checkpoint(self) -> str:
        url = self.rng.choice([self.url, self.url, *(url for url, _ in self.copies if self.ledger.newest(url))])
        return f"{url}@{self.rng.choice(sorted(self.ledger.runs[url]))}"

    def _new_copy(self, mesh: str) -> str:
        """The URL of a new copy. May delete the oldest copy, so call it before choosing a source."""
        if len(self.copies) >= COPIES:
            self.ledger.forget(self.copies.pop(0)[0])
        self.copies.append((f"s3://{BUCKET}/copy-{self.numbers}", mesh))
        return self.copies[-1][0]

    def _name(self, action: str) -> tuple[str, Path]:
        self.numbers += 1
        name = f"{self.numbers:04d}-{action.replace(' ', '-')}"
        return f"{name}.out", self.folder / name

    def _sets(self, folder: Path, steps: int, *more: str) -> list[str]:
        sets = [
            f"train.steps={steps}", f"train.seed={self.seed}", "train.device=cpu", "train.microbatch_size=2",
            "optimizer.schedule=constant", "optimizer.lr=3e-4",
            f"data.cache={self.folder / 'tokens'}", f"log.folder={folder}", "log.tensorboard=false", *more,
        ]  # fmt: skip
        return [part for text in sets for part in ("--set", text)]

    def _complain(self, text: str) -> None:
        self.seen.problems.append(text)
        _log(f"PROBLEM {text}")

    def _count(self, started: float) -> None:
        self.seen.minutes = (time.monotonic() - started) / 60
        self.seen.requests, self.seen.faults = self.proxy.num_requests, Counter(self.proxy.faults)


def _is_torchruns_exit_code(command: list[str], ended: JobResult) -> bool:
    """torchrun exits with 1 and its own table for any failure of a rank; the ledger judges those."""
    return "torch.distributed.run" in command and ended.code in (0, 1, 3) and not ended.outlived


def _titan(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "titan_ckpt", *arguments]


def _torchrun(num_ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]


def _opener(server: Server) -> Callable[[str], Store]:
    return lambda url: open_store(url, endpoint_url=server.endpoint)


def _toml(flag: bool) -> str:
    return "true" if flag else "false"


def _log(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def soak(folder: Path, *, minutes: float, seed: int) -> SoakRecord:
    """Run a soak with its own server and proxy; files go to `folder`."""
    with running_server(folder / "s3", [BUCKET]) as server:
        host, _, port = server.endpoint.removeprefix("http://").partition(":")
        os.environ.update(server.environment)
        with FaultyProxy(host, int(port)) as proxy:
            return Soak(folder, server, proxy, seed).run(minutes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the jobs' output here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--publish", type=Path, metavar="FILE", help="only write the section of the docs from such a file"
    )
    arguments = parser.parse_args()
    if arguments.publish:
        publish(json.loads(arguments.publish.read_text()))
        return 0
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        seen = soak(folder, minutes=arguments.minutes, seed=arguments.seed)
    facts: dict[str, Any] = {f.name: getattr(seen, f.name) for f in fields(seen)} | {"counts": asdict(seen.counts)}
    facts |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    text = json.dumps(facts, indent=1)
    sys.stdout.write(text + "\n")
    if arguments.json:
        arguments.json.write_text(text)
    publish(facts)
    return 1 if seen.problems else 0


if __name__ == "__main__":
    sys.exit(main())
