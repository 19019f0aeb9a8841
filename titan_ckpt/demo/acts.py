"""The acts of `titan-ckpt demo`: each runs commands as a user would, checks its claims and returns its facts."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.console.units import format_size
from titan_ckpt.demo.page import Page
from titan_ckpt.demo.processes import process_tree, send_signal
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.demo.shell import WATCH_S, DemoError, Shell, wait_for
from titan_ckpt.demo.story import Act, Facts, StoryLog
from titan_ckpt.parsing.json_values import parse_json, parse_json_line

RUN, RESHARDED = "s3://demo/run", "s3://demo/run-pp"
# Derived in docs/design.md: on another mesh only the order of float32 sums differs.
MESH_BOUND = 1e-5
LOGITS_BOUND, NUM_TOKENS = 1e-3, 512
JOB_TIMEOUT_S = 900.0
# Runs of at least this length must know the page by heart.
LEARNING_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoContext:
    """Shared by all acts: the folder, the length of runs, the server, and a shell that uses it."""

    folder: Path
    page: Page
    steps: int
    save_every: int
    server: Server
    shell: Shell

    def train(self, url: str, mesh: str, *more: str) -> list[str]:
        """The arguments of a training job that saves to `url`."""
        sets = [
            *(f"mesh.{axis}" for axis in mesh.split(",")), f"save.url={url}", f"save.every={self.save_every}",
            f"train.steps={self.steps}", *more,
        ]  # fmt: skip
        return ["train", str(self.page.config), *(part for text in sets for part in ("--set", text))]

    def server_bytes(self) -> int:
        """Bytes on the server's disk, including unfinished uploads."""
        return sum(path.stat().st_size for path in (self.folder / "s3" / "data").glob("*.dat"))

    def metrics(self, name: str) -> list[Facts]:
        """The metrics so far of a job with `log.folder=DIR/name`."""
        path = self.folder / name / "logs" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [parse_json_line(line) for line in lines if line.endswith("\n")]

    def losses(self, name: str) -> dict[int, float]:
        """The latest loss of each step."""
        return {record["step"]: record["loss"] for record in self.metrics(name) if record["event"] == "step"}


def shown(path: Path) -> str:
    """A path relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def expect(is_true: bool, otherwise: str) -> None:
    """DemoError with the message `otherwise` unless `is_true`."""
    if not is_true:
        raise DemoError(otherwise)


def serve(demo: DemoContext) -> Act:
    """Report the S3 server, on loopback, with credentials."""
    endpoint = demo.server.endpoint
    return Act(facts={"endpoint": endpoint, "bucket": "demo"}, lines=(f"SeaweedFS answers at {endpoint}, bucket demo",))


def train_and_kill(demo: DemoContext) -> tuple[Act, Act]:
    """Train to the last save; kill all processes of the job once a twentieth of that save has reached the server."""
    arguments = demo.train(RUN, "dp_shard=2,tp=2", f"log.folder={demo.folder / 'first'}")
    last, num_saves = demo.steps, demo.steps // demo.save_every - 1
    with demo.shell.job(*arguments) as process:
        wait_for(lambda: last - 1 in demo.losses("first"), process, what=f"step {last - 1}", timeout_s=JOB_TIMEOUT_S)
        victims, before = process_tree(process), demo.server_bytes()
        enough = before + before // num_saves // 20
        wait_for(
            lambda: demo.server_bytes() >= enough and _is_saving(demo, last), process, what=f"the upload of step {last}",
            timeout_s=JOB_TIMEOUT_S, poll_s=WATCH_S,
        )  # fmt: skip
        send_signal(victims)
        process.wait()
    return _trained(demo), _killed(demo, len(victims), demo.server_bytes() - before)


def _is_saving(demo: DemoContext, step: int) -> bool:
    return any(record["event"] == "save" and record["step"] == step for record in demo.metrics("first"))


def _trained(demo: DemoContext) -> Act:
    losses = demo.losses("first")
    last = max(losses)
    stalls = [record["stall_s"] for record in demo.metrics("first") if record["event"] == "save"]
    facts = {
        "mesh": "dp_shard=2,tp=2", "ranks": 4, "steps": last, "first_loss": losses[1], "last_loss": losses[last],
        "stall_s": stalls,
    }  # fmt: skip
    line = (
        f"4 ranks, mesh dp_shard=2,tp=2: {last} steps on a page of Python's manual, loss {losses[1]:.2f} -> {losses[last]:.2f} "
        f"nats; saves held training for at most {max(stalls):.2f} s"
    )
    return Act(facts=facts, lines=(line,))


def _killed(demo: DemoContext, num_processes: int, arrived_bytes: int) -> Act:
    rows = demo.shell.json("ls", RUN)
    committed = [row["step"] for row in rows if row["state"] == "committed"]
    last, previous = demo.steps, demo.steps - demo.save_every
    expect(last not in committed, f"step {last} was committed before the kill came; run the demo again")
    expect(
        bool(committed) and committed[-1] == previous,
        f"committed steps are {committed}, expected {previous} to be the last",
    )
    found = demo.shell.json("verify", RUN, "--data")
    expect(found["is_ok"] and found["step"] == previous, f"verify found {found}")
    facts = {
        "killed_processes": num_processes, "uploading_step": last, "arrived_bytes": arrived_bytes, "newest_committed": previous,
        "verified_bytes": found["read_bytes"],
    }  # fmt: skip
    lines = (
        f"SIGKILL to all {num_processes} processes while step {last} uploads: {format_size(arrived_bytes)} arrived, no COMMIT",
        f"step {previous} is the newest committed one and whole: {format_size(found['read_bytes'])} read and verified",
    )
    return Act(facts=facts, lines=lines)


def resume(demo: DemoContext) -> Act:
    """Resume on half the ranks; the losses must match the uninterrupted steps of the first run."""
    demo.shell.finish(*demo.train(RUN, "dp_shard=2", f"log.folder={demo.folder / 'resumed'}"))
    first, difference = _compare(demo, "resumed")
    committed = [row["step"] for row in demo.shell.json("ls", RUN) if row["state"] == "committed"]
    expect(committed[-1] == demo.steps, f"after the resume step {committed[-1]} is the newest, expected {demo.steps}")
    facts = {"mesh": "dp_shard=2", "ranks": 2, "from_step": first - 1, "to_step": demo.steps, **difference}
    return Act(facts=facts, lines=(f"2 ranks, mesh dp_shard=2, go on at step {first}: {_as_text(difference)}",))


def _compare(demo: DemoContext, name: str) -> tuple[int, Facts]:
    """A later job's first step, and the largest relative difference of its losses from the first job's."""
    reference, losses = demo.losses("first"), _own_losses(demo, name)
    first = demo.steps - demo.save_every + 1
    expect(
        sorted(losses) == list(range(first, demo.steps + 1)),
        f"{name} did steps {sorted(losses)}, expected from {first}",
    )
    largest = max(abs(loss - reference[step]) / reference[step] for step, loss in losses.items())
    expect(
        largest <= MESH_BOUND,
        f"{name}: losses differ by {largest:.1e} from the uninterrupted run's, bound {MESH_BOUND:.0e}",
    )
    return first, {"compared_steps": len(losses), "max_relative_difference": largest, "bound": MESH_BOUND}


def _own_losses(demo: DemoContext, name: str) -> dict[int, float]:
    """Losses since the job's own start; its metrics begin with the history of the run."""
    records = demo.metrics(name)
    start = max(number for number, record in enumerate(records) if record["event"] == "start")
    return {record["step"]: record["loss"] for record in records[start:] if record["event"] == "step"}


def _as_text(difference: Facts) -> str:
    return (
        f"{difference['compared_steps']} losses equal the uninterrupted run's within "
        f"{difference['max_relative_difference']:.1e} (bound {difference['bound']:.0e})"
    )


def reshard(demo: DemoContext) -> Act:
    """Reshard the checkpoint for a pipeline mesh, in one process without a process group, and resume on 4 ranks."""
    source = f"{RUN}@{demo.steps - demo.save_every}"
    report = demo.shell.json("reshard", source, RESHARDED, "--mesh", "pp=2,dp_shard=2")
    demo.shell.finish(*demo.train(RESHARDED, "pp=2,dp_shard=2", f"log.folder={demo.folder / 'resharded'}"))
    first, difference = _compare(demo, "resharded")
    facts = {"source": source, "mesh": "pp=2,dp_shard=2", "ranks": 4, "reshard": report, **difference}
    moved = (
        f"{source} rewritten from dp_shard=2,tp=2 to pp=2,dp_shard=2 in {report['seconds']:.1f} s "
        f"({format_size(report['read_bytes'])} read, {format_size(report['written_bytes'])} written)"
    )
    return Act(
        facts=facts, lines=(moved, f"4 ranks, mesh pp=2,dp_shard=2, go on at step {first}: {_as_text(difference)}")
    )


def convert(demo: DemoContext) -> Act:
    """Export to Hugging Face; transformers computes the trainer's logits and, after a whole run, writes the page as it is."""
    folder, page = demo.folder / "hf", demo.page
    report = demo.shell.json("convert", "to-hf", RUN, str(folder), "--verify")
    printed = demo.shell.python("titan_ckpt.demo.exported", RUN, str(folder), str(page.file), page.prompt)
    compared = parse_json(printed, "what compared the logits")
    largest, written = compared["max_logit_difference"], compared["text"]
    expect(
        compared["tokens"] >= NUM_TOKENS, f"the page has {compared['tokens']} tokens, at least {NUM_TOKENS} are needed"
    )
    expect(largest <= LOGITS_BOUND, f"logits differ by {largest:.1e} from transformers', bound {LOGITS_BOUND:.0e}")
    if demo.steps >= LEARNING_STEPS:
        expect(page.text.startswith(page.prompt + written), f"after {page.prompt!r} the model writes {written!r}")
    facts = {"export": report, "bound": LOGITS_BOUND, **compared}
    lines = (
        f"{report['tensors']} tensors ({format_size(report['bytes'])}) in {shown(folder)}; over {NUM_TOKENS} tokens "
        f"transformers' logits equal the trainer's within {largest:.1e} (bound {LOGITS_BOUND:.0e})",
        f"transformers goes on after {page.prompt!r}: {written!r}",
    )
    return Act(facts=facts, lines=lines)


def hang(demo: DemoContext) -> Act:
    """Hang a small real job and diagnose it."""
    folder = demo.folder / "incident"
    demo.shell.run("debug", "inject", "skip", "--ranks", "2", "--out", str(folder))
    truth = parse_json((folder / "truth.json").read_bytes(), "truth.json")
    verdict = demo.shell.json("debug", str(folder), expected=1)["verdicts"][0]
    expect(verdict["verdict"] == truth["verdict"], f"debug found {verdict['verdict']}, the truth is {truth['verdict']}")
    expect(
        verdict["culprits"] == truth["culprits"],
        f"debug blames ranks {verdict['culprits']}, the truth is {truth['culprits']}",
    )
    rank = verdict["culprits"][0]
    place = next((item for item in verdict["evidence"] if item["rank"] == rank and item["line"]), None)
    if place is None:
        raise DemoError(f"debug names rank {rank} but no line")
    source = linecache.getline(place["file"], place["line"]).strip()
    expect(
        "broadcast" in source, f"debug points at {place['file']}:{place['line']}: {source!r}, not where rank {rank} is"
    )
    facts = {
        "verdict": verdict["verdict"],
        "rank": rank,
        "file": place["file"],
        "line": place["line"],
        "source": source,
    }
    lines = (verdict["headline"], f"rank {rank} is at {Path(place['file']).name}:{place['line']}: {source}")
    return Act(facts=facts, lines=lines)


def look(demo: DemoContext) -> Act:
    """Open the incident in the terminal screens."""
    picture = demo.folder / "incident.svg"
    demo.shell.run("tui", str(demo.folder / "incident"), "--screenshot", str(picture))
    drawn = picture.read_text()
    expect(drawn.startswith("<svg") and "SKIPPED" in drawn, f"{picture} does not show the verdict")
    return Act(facts={"screenshot": str(picture)}, lines=(f"the incident on the screen: {shown(picture)}",))


def play(demo: DemoContext, story: StoryLog) -> None:
    """Run all acts in order; DemoError from the first that fails."""
    story.add(1, "serve", serve(demo))
    trained, killed = train_and_kill(demo)
    story.add(2, "train", trained)
    story.add(3, "kill", killed)
    acts: list[Callable[[DemoContext], Act]] = [resume, reshard, convert, hang, look]
    for number, act in enumerate(acts, start=4):
        story.add(number, act.__name__, act(demo))
