"""Screen 7: a run's checkpoints; one opened: its tensors and their cut; verify, diff, a reshard plan and a prune preview."""

from __future__ import annotations

import calendar
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from titan_ckpt.checkpoint import Checkpoint, CheckpointInfo, open_checkpoint
from titan_ckpt.diff import diff
from titan_ckpt.draw import Pieces, draw
from titan_ckpt.errors import TitanError
from titan_ckpt.estimate import estimate
from titan_ckpt.index import TensorEntry
from titan_ckpt.location import local_path, redact, scheme
from titan_ckpt.mesh import MeshSpec
from titan_ckpt.placement import format_placements
from titan_ckpt.reshard import DEFAULT_MEMORY, plan_reshard
from titan_ckpt.retention import RetentionPolicy, prune
from titan_ckpt.store import open_store
from titan_ckpt.tui import tasks
from titan_ckpt.tui.data_incident import SITUATIONS, Incident
from titan_ckpt.tui.pane import Pane
from titan_ckpt.tui.rows import Role, Row, RowList, Rows, Target, head, ranks_text, row, wrapped
from titan_ckpt.tui.session import Session
from titan_ckpt.units import format_duration, format_size
from titan_ckpt.verify import verify

SAVE_PHASES = ("ckpt_stage", "ckpt_upload", "ckpt_commit")
_ABSENT = "A run's folder has them: what save.url named, with step-00001200/ and so on in it."
_ROLES: dict[str, Role] = {"committed": "good", "partial": "warn", "damaged": "bad"}


class CheckpointsPane(Pane):
    """The list, or one checkpoint, or the answer to a question about one."""

    number = 7
    label = "Checkpoints"
    keys = (
        ("enter", "open"),
        ("v", "verify every byte"),
        ("d", "diff with the pinned step"),
        ("r", "reshard plan"),
        ("p", "prune preview"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "verify", show=False), Binding("d", "diff", show=False), Binding("r", "reshard", show=False),
        Binding("p", "prune", show=False),
    ]  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._opened: Checkpoint | None = None
        self._answer: list[Row] | None = None
        self._pinned_step: int | None = None
        self._shown = 0

    def state(self) -> tuple[object, ...]:
        part = self.session.checkpoints
        return (part.version, part.text, self._shown, self._pinned_step, self.session.incident.version)

    def title(self) -> str:
        if self._opened is not None:
            manifest = self._opened.manifest
            facts = f"{len(manifest.tensors)} tensors · {format_size(manifest.size_bytes)}"
            return f"step {self._opened.step} · mesh {manifest.mesh or 'unknown'} · {facts}"
        infos = self.session.checkpoints.value
        if infos is None:
            return "checkpoints"
        states = Counter[str](info.state for info in infos)
        counts = " · ".join(f"{states[state]} {state}" for state in _ROLES if states[state])
        return f"{redact(self.session.content.url)} · {counts or 'no steps yet'}"

    def make_rows(self, width: int) -> Rows:
        if self._answer is not None:
            return RowList(self._answer)
        if self._opened is not None:
            return RowList(tensor_rows(self._opened))
        infos, incident = self.session.checkpoints.value, self.session.incident.value
        listed = self._list(infos, width) if infos is not None else None
        rows = list(self.absent_rows(self.session.checkpoints, _ABSENT, width)) if listed is None else list(listed)
        return RowList([*rows, *(saving_rows(incident, width) if incident is not None else ())])

    def _list(self, infos: tuple[CheckpointInfo, ...], width: int) -> Iterator[Row]:
        url = local_path(self.session.content.store.url) if scheme(self.session.content.store.url) == "file" else ""
        return list_rows(infos, self._pinned_step, self.session.clock(), width, url or self.session.content.store.url)

    def _show(self, *, opened: Checkpoint | None = None, answer: list[Row] | None = None) -> None:
        self._opened, self._answer = opened or self._opened, answer
        self._shown += 1
        self.update_rows(force=True)
        self.body.move_to(0)

    def go_back(self) -> bool:
        if super().go_back():
            return True
        if self._answer is not None:
            self._show(answer=None)
            return True
        if self._opened is not None:
            self._opened = None
            self._show(answer=None)
            return True
        return False

    def chosen(self, chosen: Row) -> None:
        target = chosen.target
        if target is None or target.screen != self.number:
            super().chosen(chosen)
            return
        if self._opened is not None and target.name:
            self._show(answer=list(cut_rows(self._opened, target.name)))
        elif target.step is not None:
            step = target.step
            self.post_message(self.Work(f"opening step {step}", lambda: self._open(step), self._opened_step))

    def _open(self, step: int) -> Checkpoint | str:
        try:
            return open_checkpoint(self.session.content.store.url, step=step, store=self.session.content.store)
        except TitanError as error:
            return str(error)

    def _opened_step(self, found: Checkpoint | str) -> None:
        if isinstance(found, str):
            self._show(answer=error_rows(found, self.body.line_width))
        else:
            self._show(opened=found)

    def pin(self) -> None:
        step = self._step()
        if step is None:
            self.post_message(self.Say("no step on this line"))
            return
        self._pinned_step = None if self._pinned_step == step else step
        self.post_message(self.Say(f"step {step} {'pinned' if self._pinned_step else 'unpinned'}"))
        self.update_rows()

    def _step(self) -> int | None:
        if self._opened is not None:
            return self._opened.step
        current = self.body.current
        return current.target.step if current is not None and current.target is not None else None

    def _ask_of_step(self, what: str, work: Callable[[int], Iterable[Row]]) -> None:
        """Run `work(step)` in a thread and show its rows; errors of ours are shown as a row."""
        step = self._step()
        if step is None:
            self.post_message(self.Say("put the cursor on a step"))
            return

        width = self.body.line_width

        def safely() -> list[Row]:
            try:
                return list(work(step))
            except TitanError as error:
                return error_rows(str(error), width)

        self.post_message(self.Work(f"{what} step {step}", safely, lambda rows: self._show(answer=rows)))

    def action_verify(self) -> None:
        store, app = self.session.content.store, self.app

        def say(text: str) -> None:
            app.post_message(tasks.Progress(text, self._say_progress))

        progress = ByteProgress(say)
        sizes = {info.step: info.commit.size_bytes for info in self.session.checkpoints.value or () if info.commit}
        self._ask_of_step(
            "verifying", lambda step: verify_rows(store.url, step, progress.of(sizes.get(step, 0)).passed)
        )

    def _say_progress(self, text: str) -> None:
        self.post_message(self.Say(text))

    def action_diff(self) -> None:
        pinned, store = self._pinned_step, self.session.content.store
        if pinned is None:
            self.post_message(self.Say("pin one step with space, put the cursor on another, then d"))
            return
        self._ask_of_step(f"comparing step {pinned} with", lambda step: diff_rows(store.url, pinned, step))

    def action_reshard(self) -> None:
        step, store = self._step(), self.session.content.store
        if step is None:
            self.post_message(self.Say("put the cursor on a step"))
            return
        self.post_message(
            self.Ask(
                "mesh, such as pp=2,dp_shard=4",
                "",
                lambda mesh: self._ask_of_step(f"planning {mesh} for", lambda s: reshard_rows(store.url, s, mesh)),
            )
        )

    def action_prune(self) -> None:
        infos = self.session.checkpoints.value or ()
        self.post_message(
            self.Ask("keep how many of the newest", "3", lambda text: self._show(answer=prune_rows(infos, text)))
        )


def list_rows(
    infos: tuple[CheckpointInfo, ...], pinned: int | None, now_s: float, width: int, url: str
) -> Iterator[Row]:
    """A line per step, newest first; below one that cannot be used, why."""
    yield head(f"{'step':>10}  {'state':<10} {'kind':<8} {'size':>9}  {'age':>12}  mesh")
    for info in sorted(infos, key=lambda info: -info.step):
        mark, commit, target = "*" if info.step == pinned else " ", info.commit, Target(screen=7, step=info.step)
        facts = "" if commit is None else (
            f"{commit.kind:<8} {format_size(commit.size_bytes):>9}  {_age(commit.created, now_s):>12}  {commit.mesh or '1'}"
        )  # fmt: skip
        yield row(f"{mark}{info.step:>9}  ", (f"{info.state:<10} ", _ROLES[info.state]), facts, target=target,
                  is_problem=info.state == "damaged")  # fmt: skip
        for line in wrapped(info.problem.replace(f"{url}/", ""), width - 12) if info.problem else ():
            yield row((f"{'':12}{line}", "dim"), target=target)
    if not infos:
        yield row("no checkpoints yet")


def error_rows(error: str, width: int) -> list[Row]:
    """What went wrong, whole."""
    return [row((line, "bad"), is_problem=i == 0) for i, line in enumerate(wrapped(error, width))]


def saving_rows(incident: Incident, width: int = 76) -> Iterator[Row]:
    """What each rank was doing in a save at the moment of the incident, by the recorder's heartbeats and the verdicts."""
    beats = {rank: record.heartbeat for rank, record in incident.run.ranks.items() if record.heartbeat is not None}
    saving: dict[tuple[str, int], list[int]] = {}
    for rank, beat in beats.items():
        if beat.phase in SAVE_PHASES:
            saving.setdefault((beat.phase, beat.step), []).append(rank)
    io = [verdict for verdict in incident.verdicts if verdict.subtype == "checkpoint_io"]
    if not saving and not io:
        return
    yield row()
    yield head(f"in a save when the job stopped ({incident.run.incident or 'this incident'})")
    for (phase, step), ranks in sorted(saving.items(), key=lambda item: (item[0][1], SAVE_PHASES.index(item[0][0]))):
        newest = max(beats[rank].phase_ns for rank in ranks)
        since = max((beats[rank].alive_ns - newest) / 1e9 for rank in ranks)
        for_s = f", for {format_duration(since)}" if since > 0 else ""
        yield row((f"  {phase:<12} ", "warn"), f"step {step}: ranks {ranks_text(ranks)}{for_s}",
                  target=Target(screen=6, rank=ranks[0]), is_problem=phase != "ckpt_stage")  # fmt: skip
    outside = sorted(set(beats) - {rank for ranks in saving.values() for rank in ranks})
    if saving and outside:
        yield row(("  elsewhere    ", "dim"), f"ranks {ranks_text(outside)}")
    for verdict in io:
        for line in wrapped(f"  {verdict.headline}", width, "    "):
            yield row((line, "bad"), target=Target(screen=6, rank=verdict.culprits[0]), is_problem=True)
    if not saving:
        yield from _place_rows(incident)


def _place_rows(incident: Incident) -> Iterator[Row]:
    """Without heartbeats: where each rank stood, ranks at the same line together."""
    places: dict[tuple[str, str], list[int]] = {}
    for rank, state in sorted(incident.states.items()):
        frame = state.frame
        place = f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}" if frame is not None else "no stack"
        places.setdefault((state.kind, place), []).append(rank)
    for (kind, place), ranks in places.items():
        glyph, role, words = SITUATIONS[kind]
        yield row(
            (f"  {glyph} ", role),
            f"ranks {ranks_text(ranks, 4)}: {words}, {place}",
            target=Target(screen=6, rank=ranks[0]),
        )


def _age(created: str, now_s: float) -> str:
    try:
        made = time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return "?"
    return format_duration(max(0.0, now_s - calendar.timegm(made)))


def tensor_rows(checkpoint: Checkpoint) -> Iterator[Row]:
    """A line per tensor; enter draws its cut."""
    yield head(f"{'shape':<20} {'dtype':<10} {'chunks':>6}  {'cut':<22} name")
    for tensor in checkpoint.manifest.tensors:
        cut = "unknown" if tensor.placements is None else format_placements(tensor.placements)
        shape = "x".join(map(str, tensor.global_shape)) or "scalar"
        yield row(f"{shape:<20} {tensor.dtype:<10} {tensor.num_chunks:>6}  {cut:<22} {tensor.fqn}",
                  target=Target(screen=7, step=checkpoint.step, name=tensor.fqn))  # fmt: skip


def cut_rows(checkpoint: Checkpoint, fqn: str) -> Iterator[Row]:
    """How a tensor is cut, drawn: each spot with the file that holds it."""
    tensor: TensorEntry = checkpoint.manifest.by_fqn[fqn]
    offsets, sizes = checkpoint.manifest.boxes(tensor)
    holders = [chunk.file.rpartition("__")[2].partition("_")[0] for chunk in checkpoint.manifest.chunks_of(tensor)]
    yield head(f"{fqn}: {tensor.global_shape} {tensor.dtype}; each spot shows the rank that wrote it")
    pieces = Pieces(offsets=np.asarray(offsets), sizes=np.asarray(sizes), holders=holders)
    for line in draw(tensor.global_shape, pieces, is_coloured=False).splitlines():
        yield row("  " + line)


class ByteProgress:
    """Says how far a reading of many bytes is, each time another hundredth has passed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._total, self._read, self._said = say, 0, 0, -1

    def of(self, total_bytes: int) -> ByteProgress:
        """Begin anew, with this many bytes to come."""
        self._total, self._read, self._said = total_bytes, 0, -1
        return self

    def passed(self, size_bytes: int) -> None:
        """So many bytes more were read."""
        self._read += size_bytes
        percent = min(100 * self._read // max(self._total, 1), 100)
        if percent > self._said:
            self._said = percent
            self._say(f"{format_size(self._read)} of {format_size(self._total)} ({percent}%)")


def verify_rows(url: str, step: int, on_bytes: Callable[[int], None]) -> Iterator[Row]:
    """Every byte re-read."""
    started = time.monotonic()
    problems = verify(f"{url}@{step}", read_data=True, on_bytes=on_bytes)
    yield head(f"step {step}: {len(problems)} problems ({format_duration(time.monotonic() - started)})")
    for problem in problems:
        yield row((str(problem), "bad"), is_problem=True)
    if not problems:
        yield row(("every byte is what was saved", "good"))


def diff_rows(url: str, a: int, b: int) -> Iterator[Row]:
    """Names, shapes, dtypes and values of two steps."""
    found = diff(open_checkpoint(url, step=a), open_checkpoint(url, step=b), values=True)
    yield head(f"step {a} and step {b}: {len(found)} differences")
    for difference in found:
        error = "" if difference.max_abs is None else f"  max abs {difference.max_abs:.3g}"
        yield row(f"{difference.kind:<10} {difference.fqn}{error}")
    if not found:
        yield row(("equal", "good"))


def reshard_rows(url: str, step: int, mesh: str) -> Iterator[Row]:
    """What `titan-ckpt reshard` would do; nothing is read but the index."""
    plan = plan_reshard(open_checkpoint(url, step=step), MeshSpec.parse(mesh))
    facts = estimate(plan, open_store(url), memory_bytes=DEFAULT_MEMORY)
    smallest, largest = format_size(facts.smallest_file_bytes), format_size(facts.largest_file_bytes)
    cuts = ", ".join(f"{count} as {origin}" for origin, count in facts.placements.items() if count)
    yield head(f"step {step}: mesh {facts.source_mesh or 'not recorded'} -> {facts.mesh}")
    yield row(
        f"  read      {format_size(facts.read_bytes)} in {facts.read_requests:,} requests of {facts.num_source_files:,} files"
    )
    yield row(f"  write     {format_size(facts.written_bytes)} in {facts.num_files:,} files of {smallest} to {largest}")
    yield row(f"  tensors   {facts.num_tensors:,}, cut {cuts or 'nowhere'}")
    yield row(f"  memory    at most {format_size(facts.peak_memory_bytes)} of buffers, in {facts.num_waves:,} waves")
    for name, start, length in facts.largest_reads[:3]:
        yield row((f"  large     {format_size(length)} at {start:,} of {name}", "dim"))
    if facts.guessed:
        yield row(("  ! ", "warn"), f"cut by the table of known models, not recorded: {', '.join(facts.guessed)}")
    yield row((f"titan-ckpt reshard {redact(url)}@{step} DESTINATION --mesh {mesh}", "dim"))


def prune_rows(infos: tuple[CheckpointInfo, ...], text: str) -> list[Row]:
    """What `titan-ckpt prune --keep-last N` would delete."""
    if not text.isdigit() or int(text) < 1:
        return [row((f"{text!r} is not a number above 0", "bad"))]
    gone = prune(infos, RetentionPolicy(keep_last=int(text)))
    rows = [head(f"keep the newest {text}: {len(gone)} steps would go (nothing is deleted here)")]
    return rows + [row(f"  step {info.step}") for info in gone]
