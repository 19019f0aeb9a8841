"""A job over three hosts whose links are cut and restored, during steps and saves: what is lost, and what it costs.

    python -m scripts.hosts [--only NAME]        the table goes to docs/reliability.md

The hosts are network namespaces on a switch (hosts_network.py), each with an elastic agent and one rank; the rendezvous has a
host of its own, and so has the S3 server. A cut link drops packets silently. Agents that fail are restarted, as Slurm and
Kubernetes do. Each job must finish with the losses of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tabulate import tabulate

from scripts.hosts_attempts import Attempt, read_attempts
from scripts.hosts_network import STORAGE, Network, enter
from scripts.soak_report import RELIABILITY
from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.store.open import open_store
from tools.faults.proxy import FaultyProxy, HttpRequest, RequestFault, RequestFaultKind
from tools.paths import DEBUG_CONFIG
from tools.report import replace_section
from tools.soak.ledger import Ledger

BUCKET = "hosts"
HEAD, HOSTS = "head", ("one", "two", "three")
RENDEZVOUS_PORT = 29400
STEPS, EVERY = 500, 20
STEP_TIMEOUT_S, SAVE_TIMEOUT_S = 15, 40
LIMIT_S = 400.0
POLL_S = 0.05
STORE = (
    "import sys, time, torch.distributed as d; "
    f"s = d.TCPStore(sys.argv[1], {RENDEZVOUS_PORT}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)
# An agent is dropped after 6 s of silence; two of three hosts are enough. An agent whose rendezvous read times out fails and
# closes the rendezvous for all later agents, so `read_timeout` must exceed every cut.
CONF = (
    "is_host=false,join_timeout=120,last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3,read_timeout=150"
)


@dataclass(slots=True)
class ScenarioResult:
    """Results of one scenario."""

    name: str
    what: str = ""
    cut_s: float = 0.0
    attempts: list[int] = field(default_factory=list)
    again: int = 0
    agents_restarted: int = 0
    jobs_restarted: int = 0
    pause_s: float = 0.0
    lost: int = 0
    problems: list[str] = field(default_factory=list)


class ElasticJob:
    """Elastic agents on the hosts, kept running until the job has finished."""

    def __init__(self, folder: Path, network: Network, endpoint: str, server: Server, sets: Sequence[str]) -> None:
        self.folder, self.network = folder, network
        self.agents_restarted = self.jobs_restarted = 0
        self._environment = {
            **server.environment, "AWS_ENDPOINT_URL": endpoint, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        self._sets = [part for text in sets for part in ("--set", text)]
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, Path] = {}
        self._numbers = itertools.count()
        head = network.addresses[HEAD]
        self._head = subprocess.Popen(network.on(HEAD, [sys.executable, "-c", STORE, head]), env=self._env())
        for host in HOSTS:
            self._start(host)

    def _env(self) -> dict[str, str]:
        return os.environ | self._environment

    def _start(self, host: str) -> None:
        endpoint = f"{self.network.addresses[HEAD]}:{RENDEZVOUS_PORT}"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=20",
            f"--rdzv-id=job-{self.jobs_restarted}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}",
            f"--rdzv-conf={CONF}", f"--local-addr={self.network.addresses[host]}", "--monitor-interval=0.2",
            "-m", "titan_ckpt", "train", DEBUG_CONFIG, *self._sets,
        ]  # fmt: skip
        self._outputs[host] = self.folder / f"agent-{host}-{next(self._numbers)}"
        with open(self._outputs[host], "wb") as output:
            self._agents[host] = subprocess.Popen(
                self.network.on(host, command), stdout=output, stderr=output, env=self._env(), start_new_session=True
            )

    def watch(self) -> bool:
        """Restart failed agents, or the whole job if none is left, as a cluster does; True once the job has finished."""
        codes = {host: agent.poll() for host, agent in self._agents.items()}
        if all(code is not None for code in codes.values()):
            if 0 in codes.values():
                return True
            self.jobs_restarted += 1
            for host in HOSTS:
                self._start(host)
            return False
        for host, code in codes.items():
            if code not in (None, 0) and not self._is_shut_out(host):
                self.agents_restarted += 1
                self._start(host)
        return False

    def _is_shut_out(self, host: str) -> bool:
        """Whether the rendezvous is closed: an agent that fails on its own closes it for all later agents."""
        return "RendezvousClosedError" in self._outputs[host].read_text(errors="replace")

    def output(self) -> str:
        """The end of each agent's output."""
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in sorted(self.folder.glob("agent-*")))

    def close(self) -> None:
        """Kill all agents and the rendezvous."""
        for agent in [*self._agents.values(), self._head]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL) if agent is not self._head else agent.kill()
            agent.wait()


@dataclass(slots=True, kw_only=True)
class Scenario:
    """Everything that a scenario acts on."""

    network: Network
    proxy: FaultyProxy
    job: ElasticJob
    run: Path
    story: ScenarioResult

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Watch the job until `condition` holds; TimeoutError after `LIMIT_S`."""
        give_up_at = time.monotonic() + LIMIT_S
        while not condition():
            self.job.watch()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{what} did not happen in {LIMIT_S:.0f} s\n{self.job.output()}")
            time.sleep(POLL_S)

    def comes_to(self, step: int, *, attempt: int) -> Callable[[], bool]:
        """A condition: the attempt of this number has reached `step`."""
        return lambda: len(found := read_attempts(self.run)) > attempt and max(found[attempt].steps, default=0) >= step

    @contextlib.contextmanager
    def cable_pulled(self, host: str) -> Iterator[None]:
        """Cut a host's link for the duration of the block."""
        self.network.cut(host)
        started = time.monotonic()
        try:
            yield
        finally:
            self.story.cut_s = time.monotonic() - started
            self.network.restore(host)

    def wait_for_upload(self, client: str) -> None:
        """Wait until `client` uploads a data file, and delay that upload so that the cut falls into it."""
        on_its_way = threading.Event()

        def rule(request: HttpRequest) -> RequestFault | None:
            if request.method != "PUT" or ".distcp" not in request.path or request.client != client:
                return None
            on_its_way.set()
            return RequestFault(kind=RequestFaultKind.SLOW, seconds=2.0)

        self.proxy.rule = rule
        self.until(on_its_way.is_set, f"an upload from {client}")
        self.proxy.heal()


# Scenarios; their docstrings are rows of docs/reliability.md


def short_cut_in_a_step(scene: Scenario) -> None:
    """a host's cable for 4 s while it steps"""
    scene.until(scene.comes_to(2 * EVERY + 5, attempt=0), "training")
    with scene.cable_pulled("three"):
        time.sleep(4.0)  # length of the cut


def long_cut_in_a_step(scene: Scenario) -> None:
    """a host's cable while it steps, until the others go on without it"""
    scene.until(scene.comes_to(2 * EVERY + 5, attempt=0), "training")
    with scene.cable_pulled("three"):
        scene.until(scene.comes_to(1, attempt=1), "going on with two hosts")


def long_cut_in_a_save(scene: Scenario) -> None:
    """a host's cable while it uploads, until the others go on without it"""
    scene.until(scene.comes_to(2 * EVERY + 5, attempt=0), "training")
    scene.wait_for_upload(scene.network.addresses["three"])
    with scene.cable_pulled("three"):
        scene.until(scene.comes_to(1, attempt=1), "going on with two hosts")


def store_away_for_a_moment(scene: Scenario) -> None:
    """the S3 server's cable for 10 s while all upload"""
    scene.until(scene.comes_to(2 * EVERY + 5, attempt=0), "training")
    scene.wait_for_upload(scene.network.addresses["one"])
    with scene.cable_pulled(STORAGE):
        time.sleep(10.0)  # length of the cut


def store_away_for_long(scene: Scenario) -> None:
    """the S3 server's cable while all upload, until the save has failed on every host"""
    scene.until(scene.comes_to(2 * EVERY + 5, attempt=0), "training")
    scene.wait_for_upload(scene.network.addresses["one"])
    with scene.cable_pulled(STORAGE):
        scene.until(lambda: "nothing was committed" in scene.job.output(), "a save that fails")


SCENARIOS = (
    short_cut_in_a_step, long_cut_in_a_step, long_cut_in_a_save, store_away_for_a_moment, store_away_for_long,
)  # fmt: skip


def run_scenario(
    story: Callable[[Scenario], None], folder: Path, network: Network, server: Server, reference: list[float]
) -> ScenarioResult:
    """Run one job through one scenario, and check its checkpoints and losses."""
    name = story.__name__
    result = ScenarioResult(name=name, what=(story.__doc__ or "").strip())
    host, _, port = server.endpoint.removeprefix("http://").partition(":")
    (folder / name).mkdir()
    ledger = Ledger(
        open_direct=lambda url: open_store(url, endpoint_url=server.endpoint), complain=result.problems.append
    )
    ledger.references[0] = reference
    url, run = f"s3://{BUCKET}/{name}", folder / name / "run"
    with FaultyProxy(host, int(port), listen=network.addresses[STORAGE]) as proxy:
        job = ElasticJob(
            folder / name, network, proxy.endpoint, server, _sets(folder, f"save.url={url}", f"log.folder={run}")
        )
        scene = Scenario(network=network, proxy=proxy, job=job, run=run, story=result)
        try:
            story(scene)
            ledger.look(url, promised=_promised(run))
            scene.until(job.watch, "the end")
        except TimeoutError as error:
            result.problems.append(str(error))
        finally:
            result.agents_restarted, result.jobs_restarted = job.agents_restarted, job.jobs_restarted
            job.close()
    ledger.look(url, promised=_promised(run))
    _judge(result, read_attempts(run), ledger, url)
    return result


def _judge(result: ScenarioResult, attempts: list[Attempt], ledger: Ledger, url: str) -> None:
    losses: dict[int, float] = {}
    for number, attempt in enumerate(attempts):
        ledger.check_losses(0, f"attempt {number}", url, attempt.start, f"step {attempt.start}", attempt.steps)
        losses |= attempt.steps
    for before, after in itertools.pairwise(attempts):
        result.again += max(before.steps, default=after.start) - after.start
        result.pause_s = max(result.pause_s, after.began_s - max(before.ended_s, before.began_s))
        if max(before.steps, default=after.start) - after.start > 2 * EVERY:
            result.problems.append(
                f"{result.again} steps were repeated, more than two save intervals after one interruption"
            )
    result.attempts, result.lost = [attempt.ranks for attempt in attempts], ledger.counts.lost
    if sorted(losses) != list(range(1, STEPS + 1)):
        result.problems.append(f"steps {sorted(set(range(1, STEPS + 1)) - set(losses))[:5]} ... were never made")
    if ledger.newest(url) != STEPS:
        result.problems.append(f"the newest checkpoint is of step {ledger.newest(url)}, not {STEPS}")


def _promised(run: Path) -> list[int]:
    path = run / "logs" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [int(record["committed_step"]) for record in records if record.get("committed_step") is not None]


def _sets(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        f"train.steps={STEPS}", "train.global_batch_size=6", "data.seq_len=128", "optimizer.schedule=constant",
        "train.device=cpu", f"train.step_timeout_s={STEP_TIMEOUT_S}", "train.init_timeout_s=60", f"save.every={EVERY}",
        f"save.timeout_s={SAVE_TIMEOUT_S}", "log.tensorboard=false", f"data.cache={folder / 'tokens'}", *more,
    )  # fmt: skip


def make_reference(folder: Path) -> list[float]:
    """The losses of an uninterrupted run in one process."""
    arguments = [
        part for text in _sets(folder, f"log.folder={folder / 'alone'}", "save.every=0") for part in ("--set", text)
    ]
    done = subprocess.run(
        [sys.executable, "-m", "titan_ckpt", "train", DEBUG_CONFIG, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the uninterrupted run failed:\n{done.stderr[-3000:]}")
    losses = read_attempts(folder / "alone")[0].steps
    return [losses[step] for step in sorted(losses)]


def publish(stories: Sequence[ScenarioResult]) -> None:
    """Write the section of docs/reliability.md."""
    rows = [
        (s.what, f"{s.cut_s:.0f} s", " -> ".join(map(str, s.attempts)), s.again, f"{s.pause_s:.0f} s" if s.pause_s else "-",
         s.agents_restarted, s.jobs_restarted, s.lost, len(s.problems) - s.lost)
        for s in stories
    ]  # fmt: skip
    headers = [
        "pulled",
        "for",
        "ranks",
        "steps made again",
        "pause",
        "agents started again",
        "jobs started again",
        "lost",
        "wrong",
    ]
    table = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
    text = f"""## Cables that are pulled

`python -m scripts.hosts`: three hosts (network namespaces on a switch, an elastic agent and a rank each), the rendezvous and the
S3 server on hosts of their own. A pulled cable loses packets and tells nobody. {STEPS} steps, a save every {EVERY}, two hosts are
enough to go on; `train.step_timeout_s = {STEP_TIMEOUT_S}`, `save.timeout_s = {SAVE_TIMEOUT_S}`, an agent is given up after 6 s
of silence. Every job came to its end with the losses of a run that nothing interrupts; then all checkpoints were read whole.

{time.strftime("%Y-%m-%d")}, torch {torch.__version__}

{table}"""
    replace_section(RELIABILITY, "hosts", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[story.__name__ for story in SCENARIOS])
    parser.add_argument("--folder", type=Path, help="keep everything here (default: a temporary folder)")
    arguments = parser.parse_args()
    code = enter("scripts.hosts", sys.argv[1:])
    if code is not None:
        return code
    torch.set_num_threads(1)
    chosen = [story for story in SCENARIOS if not arguments.only or story.__name__ in arguments.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        network = Network((HEAD, *HOSTS))
        reference = make_reference(folder)
        with running_server(folder / "s3", [BUCKET]) as server:
            os.environ.update(server.environment)
            stories = []
            for story in chosen:
                stories.append(run_scenario(story, folder, network, server, reference))
                sys.stderr.write(f"{stories[-1]}\n")
    if not arguments.only:
        publish(stories)
    return 1 if any(story.problems for story in stories) else 0


if __name__ == "__main__":
    sys.exit(main())
