"""Text files of a run: stacks to stack snapshots, everything else to `JobText`; at the end all of them to logs of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain

from titan_ckpt.debug.incident.kinds import IN_LOG, FlagKind
from titan_ckpt.debug.incident.records import MAX_RANK, TIMER, RankLog
from titan_ckpt.debug.read.assemble import RankEvidence, RunEvidence
from titan_ckpt.debug.read.discovery import TEXT_ENDINGS, EvidenceFile, evidence_file, log_chunks, newest
from titan_ckpt.debug.read.log_names.earlier_runs import forget_earlier_runs
from titan_ckpt.debug.read.log_names.numbers import name_ranks, name_recorded
from titan_ckpt.debug.read.log_names.pids import Pids, host_in
from titan_ckpt.debug.read.log_names.pods import pod_log
from titan_ckpt.debug.read.logs import combine
from titan_ckpt.debug.read.recorder_files import LiveProcess
from titan_ckpt.debug.read.reports.exports import PAGES, TABLES, page_text, table_lines
from titan_ckpt.debug.read.reports.gpu_state import is_gpu_state, read_gpu_state
from titan_ckpt.debug.read.reports.inspector import compared, is_inspector, read_inspector
from titan_ckpt.debug.read.reports.process_stacks import ProcessStacks, is_process_stacks, read_process_stacks
from titan_ckpt.debug.read.reports.ras import is_ras_text, read_ras_text
from titan_ckpt.debug.read.reports.sections import sections
from titan_ckpt.debug.read.stacks import parse_stacks
from titan_ckpt.debug.read.text.encodings import as_utf8
from titan_ckpt.debug.read.text.job_text import NOBODY, JobText, read_lines, read_text
from titan_ckpt.debug.read.text.nccl_calls import told_by
from titan_ckpt.debug.read.text.prefixes import POD
from titan_ckpt.debug.read.text.streams import Stream
from titan_ckpt.debug.read.text.writers.labels import Writer
from titan_ckpt.debug.read.text.writers.of_run import OfRun
from titan_ckpt.parsing.unpacking import PACKED

STREAMED_BYTES = 4 << 20
_NO_LOGS = (
    ".py",
    ".md",
    ".rst",
    ".toml",
    ".yaml",
    ".yml",
    ".html",
    ".htm",
    ".xml",
    ".sh",
    ".c",
    ".cpp",
    ".cu",
    ".ipynb",
    ".lock",
)
NOTES = (".md", ".rst", *PAGES)  # in which people paste logs, and browsers save them
_LOG_WORDS = (
    "log",
    "out",
    "err",
    "console",
    "slurm",
    "dmesg",
    "syslog",
    "messages",
    "stdout",
    "stderr",
    "journal",
    "train",
)
SLACK_S = 10.0  # from a launch to the start of the recorder


def is_streamed(file: EvidenceFile) -> bool:
    """Whether a file is a log to be read in chunks: it may be larger than memory."""
    is_packed = file.path.endswith(PACKED)
    return file.suffix in TEXT_ENDINGS and (is_packed or file.size_bytes > STREAMED_BYTES)


def stream_text(evidence: RunEvidence, file: EvidenceFile) -> None:
    """Read a log of any length."""
    chunks = as_utf8(log_chunks(evidence.store, file, evidence.on_bytes))
    first = next(chunks, (b"", False))
    if is_inspector(first[0][:_HEAD]):
        take_progress(evidence, file, (chunk for chunk, _ in chain([first], chunks)))
    elif len(first[0]) < STREAMED_BYTES and is_stacks(file, first[0]):
        take_text(evidence, file, b"".join(chunk for chunk, _ in chain([first], chunks)))
    else:
        _take_log(evidence, file, chain([first], chunks))


def is_json_lines(data: bytes) -> bool:
    """Whether each line is a JSON object of its own, as container runtimes write logs, and none of a document of many lines."""
    lines = [line.strip() for line in data[:1_000_000].split(b"\n")[:20] if line.strip()]
    if any(not line.endswith(b"}") for line in lines[:-1]):
        return False
    is_docker = len(lines) == 1 and lines[0].startswith(b'{"log":')
    return is_docker or (len(lines) > 1 and all(line.startswith(b"{") and len(line) > 2 for line in lines))


def take_text(evidence: RunEvidence, file: EvidenceFile, data: bytes) -> None:
    """Stacks, another tool's report, or a log."""
    data = b"".join(chunk for chunk, _ in as_utf8([(data, False)]))
    head = data[:_HEAD]
    if is_inspector(head):
        take_progress(evidence, file, [data])
    elif file.path.endswith(TABLES):
        take_quoted(evidence, file, table_lines(data.decode("utf-8", "replace"), file.path))
    elif file.path.endswith(PAGES):
        _take_log(evidence, file, [(page_text(data.decode("utf-8", "replace")).encode(), False)])
    elif is_process_stacks(head.decode("utf-8", "replace")):
        _take_processes(evidence, file, data.decode("utf-8", "replace"))
    elif is_ras_text(head):
        take_report(evidence, read_ras_text(data.decode("utf-8", "replace"), file.path, f"{file.modified_s:.0f}"))
    elif is_gpu_state(head):
        take_report(evidence, read_gpu_state(data.decode("utf-8", "replace"), file.path))
    elif file.rank is not None and is_stacks(file, data):
        _take_stacks(evidence, file, data.decode("utf-8", "replace"))
    elif not _take_sections(evidence, file, data):
        _take_log(evidence, file, [(data, False)], is_manifest=_is_manifest(head))


def _is_manifest(head: bytes) -> bool:
    """Whether it is a job of Kubeflow in YAML, or the status of one."""
    return b"apiVersion: kubeflow.org/" in head or b"\nreplicaStatuses:" in head or b" replicaStatuses:" in head


def _take_sections(evidence: RunEvidence, file: EvidenceFile, data: bytes) -> bool:
    """The logs that one text holds, as files below it, of attempts the last alone; whether it holds several."""
    if len(data) > STREAMED_BYTES or _is_no_log(evidence, file):
        return False
    parts = dict(sections(data.decode("utf-8", "replace")))
    files = {
        name: evidence_file(f"{file.path}/{name}" if name else file.path, len(data), file.modified_s) for name in parts
    }
    kept = {part.path for part in newest(list(files.values()))}
    for name, lines in parts.items():
        if files[name].path in kept:
            _take_text(evidence, files[name], partial(read_lines, physical=lines))
    return bool(parts)


def take_progress(evidence: RunEvidence, file: EvidenceFile, chunks: Iterable[bytes]) -> None:
    """A file of NCCL's inspector; its ranks are compared when all are read."""
    evidence.num_evidence += 1
    evidence.progress += read_inspector(chunks, file.path)


def take_quoted(evidence: RunEvidence, file: EvidenceFile, lines: Iterable[str]) -> None:
    """Text that a JSON document holds."""
    _take_log(evidence, file, [("\n".join(lines).encode("utf-8", "replace"), False)])


def take_report(evidence: RunEvidence, text: JobText) -> None:
    """What another tool says of the job's processes and devices."""
    evidence.num_evidence += 1
    evidence.texts.append(text)


def _take_processes(evidence: RunEvidence, file: EvidenceFile, text: str) -> None:
    for process in read_process_stacks(text, file.path):
        take_process(evidence, file, process)


def take_live_process(evidence: RunEvidence, found: LiveProcess) -> None:
    """A process that `debug collect --pid` looked at; a data loader's workers, which share its environment, are younger."""
    evidence.num_evidence += 1
    evidence.world_size = max(evidence.world_size, found.world_size)
    if found.rank is not None and found.pid <= evidence.pid_of_file.get(found.rank, found.pid):
        evidence.ranks[found.rank].process_state = found.state
        evidence.host_of_file[found.rank], evidence.pid_of_file[found.rank] = found.host, found.pid
    if found.slept_since > MOST_SLEEPS:
        text = (
            f"its main thread slept and woke {found.slept_since} times from one look to the next: it may have gone on"
        )
        evidence.flag(FlagKind.WENT_ON, text, f"pid {found.pid}", found.rank)


def take_process(evidence: RunEvidence, file: EvidenceFile, process: ProcessStacks) -> None:
    """The stacks of a process: the rank's that the file's name gives, else of the rank that the process turns out to be."""
    if not process.stacks.threads:
        raise ValueError("a stack dump without a thread")
    rank = process.rank if process.rank is not None else file.rank
    if rank is not None:
        _rank(evidence, rank).stacks.append(process.stacks)
        evidence.pid_of_file.setdefault(rank, process.pid or 0)
        return
    evidence.num_evidence += 1
    named = _PID_IN_NAME.search(file.path.rpartition("/")[2])
    evidence.processes.append(process if process.pid or not named else replace(process, pid=int(named[1] or named[2])))


MOST_SLEEPS = 2  # of a thread that waits for one thing
_HEAD = 4096
_PID_IN_NAME = re.compile(r"pid[_.-]?(\d{1,9})|(?<!\d)(\d{3,9})(?!\d)")


def is_stacks(file: EvidenceFile, data: bytes) -> bool:
    """Whether a file is a stack dump, and no log with one inside."""
    head = data[:4096]
    has_stacks = b"most recent call first" in head and b"Traceback" not in head
    return file.suffix == ".stacks" or (has_stacks and file.suffix in ("", ".txt"))


def _take_stacks(evidence: RunEvidence, file: EvidenceFile, text: str) -> None:
    assert file.rank is not None
    if file.reason == "gil":
        text = text[max(0, text.rfind("Timeout (")) :]  # the timer may have gone off before: the last time counts
    is_abort = file.reason == "fatal" and "Fatal Python error: Aborted" in text[:200]
    is_timer = file.reason != "gil" and text.lstrip().startswith("Timeout (")
    reason = "fatal abort" if is_abort else TIMER if is_timer else file.reason
    _rank(evidence, file.rank).stacks.append(parse_stacks(text, file.path, reason))


def _rank(evidence: RunEvidence, rank: int) -> RankEvidence:
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank {rank} is not possible")
    evidence.num_evidence += 1
    return evidence.ranks[rank]


def _take_log(
    evidence: RunEvidence, file: EvidenceFile, chunks: Iterable[tuple[bytes, bool]], *, is_manifest: bool = False
) -> None:
    """`is_manifest`: a job's description in YAML, whose status is evidence."""
    if is_manifest or not _is_no_log(evidence, file):
        _take_text(evidence, file, partial(read_text, chunks=chunks))


def _is_no_log(evidence: RunEvidence, file: EvidenceFile) -> bool:
    """Whether the name is that of a program or a page; where there are pages alone, logs may be pasted there."""
    name = file.path.rpartition("/")[2].lower()
    return name.endswith(_NO_LOGS) and not (evidence.has_notes_only and name.endswith(NOTES))


def _take_text(evidence: RunEvidence, file: EvidenceFile, read: Callable[[JobText], JobText]) -> None:
    name = file.path.rpartition("/")[2].lower()
    if file.rank is not None and evidence.recorded_ranks and file.rank >= evidence.recorded_ranks:
        return  # of an earlier, larger run
    text = JobText(
        source=file.path,
        scope=file.host_folder or file.path,
        default=_writer(file),
        year=datetime.fromtimestamp(max(0.0, min(file.modified_s, 4e9)), UTC).year,
        of_run=OfRun(since_s=evidence.started_s - SLACK_S, until_s=evidence.until_s) if evidence.started_s else OfRun(),
    )
    read(text)
    if not text.num_lines and file.host_folder and "stderr" in name:
        text.writers[text.default] = Stream(source=file.path)  # which says that this rank wrote no error
    is_log = file.suffix in TEXT_ENDINGS or any(word in name for word in _LOG_WORDS if not name.endswith(NOTES))
    endings = text.endings
    has_content = (
        endings.found
        or endings.notes
        or endings.code is not None
        or any(s.events or s.last_step is not None or w[0] == "rank" for w, s in text.writers.items())
    )
    if is_log or has_content:
        evidence.num_evidence += 1
        evidence.texts.append(text)
        if text.is_turned:
            said = "it has its newest line first; lines are counted from its end"
            evidence.flag(FlagKind.NEWEST_FIRST, said, file.path)


def _writer(file: EvidenceFile) -> Writer:
    if file.rank is None:
        pod = pod_log(file.path)
        return ("host", pod.name, POD) if pod else NOBODY
    return ("local", f"{file.host_folder}|", file.rank) if file.host_folder else ("rank", "", file.rank)


def finish_texts(evidence: RunEvidence) -> None:
    """Give every rank its logs, exits and crash stacks, once all files were read."""
    processes: list[tuple[int, int, str]] = []
    for rank, known in evidence.ranks.items():
        pid = known.sidecar.pid if known.sidecar else known.box.pid if known.box else None
        if pid:
            processes.append((pid, rank, known.sidecar.host if known.sidecar else ""))
    _forget_earlier_attempts(evidence.texts)
    _forget_restarted(evidence)
    evidence.flags.extend(forget_earlier_runs(evidence.texts))
    if evidence.ranks:
        name_recorded(evidence.texts, sum(found.sidecar is not None for found in evidence.ranks.values()))
    else:
        name_ranks(evidence.texts)
    take_calls(evidence.texts)
    texts = [*evidence.texts, *compared(evidence.progress)]
    logs = combine(texts, processes)
    for rank, found in logs.ranks.items():
        if not evidence.recorded_ranks or rank < evidence.recorded_ranks:
            evidence.ranks[rank].logs.extend(found)
    for rank, source, crash in logs.crashes:
        if rank >= 0:
            is_fatal, is_abort = crash.startswith("Fatal"), crash.startswith("Fatal Python error: Aborted")
            is_timer = crash.startswith("Timeout (")
            is_end = crash.rstrip().rpartition("\n")[2].lstrip().startswith(("File ", "Current thread ", "Thread "))
            reason = (
                "fatal abort"
                if is_abort
                else "fatal"
                if is_fatal
                else TIMER
                if is_timer
                else IN_LOG
                if is_end
                else "log"
            )
            evidence.ranks[rank].stacks.append(parse_stacks(crash, source, reason))
    evidence.exits.extend(logs.exits)
    evidence.world_size = max([evidence.world_size, logs.num_ranks, *(text.num_ranks for text in texts)])
    evidence.launcher = logs.launcher or evidence.launcher
    evidence.job_log = _without_ranks_noise(logs.job)
    evidence.hosts, evidence.pids = {**logs.hosts, **evidence.host_of_file}, {**logs.pids, **evidence.pid_of_file}
    numbered = [*((pid, rank) for rank, pid in evidence.pids.items()), *((pid, rank) for pid, rank, _ in processes)]
    _place_processes(evidence, Pids(numbered, evidence.hosts))


def take_calls(texts: Sequence[JobText]) -> None:
    """Note what NCCL's logs say of ranks that called otherwise or less than the others, or that never came."""
    by_source = {text.source: text for text in texts}
    for told in told_by([text.nccl for text in texts if text.nccl.members]):
        by_source[told.source].endings.notes.append(told.note)
        by_source[told.source].num_ranks = max(by_source[told.source].num_ranks, told.size)


def _place_processes(evidence: RunEvidence, pids: Pids) -> None:
    """Give stacks to the ranks of their processes."""
    for process in evidence.processes:
        host = host_in(process.stacks.source, set(evidence.hosts.values()))
        rank = pids.rank(process.pid, host) if process.pid else -1
        if rank < 0 and process.local_rank is not None and not evidence.ranks.get(process.local_rank):
            rank = process.local_rank
        if rank < 0:
            text = f"stacks of process {process.pid or '?'}: nothing says which rank it is"
            evidence.flag(FlagKind.RANK_UNKNOWN, text, process.stacks.source)
        else:
            evidence.ranks[rank].stacks.append(process.stacks)
            evidence.pids = {**evidence.pids, **({rank: process.pid} if process.pid else {})}


_LATER_ATTEMPT = re.compile(r"attempt_0*[1-9]\d*$")


def _forget_earlier_attempts(texts: Iterable[JobText]) -> None:
    """Where files of a later attempt are there, they hold what its ranks wrote; torchrun's console holds all attempts."""
    texts = list(texts)
    if any(_LATER_ATTEMPT.search(text.scope) for text in texts):
        for text in texts:
            if text.endings.is_elastic and "attempt_" not in text.scope:
                text.endings.found = [
                    ending for ending in text.endings.found if ending.time_s is not None
                ]  # the last table
                text.writers = {
                    writer: stream for writer, stream in text.writers.items() if writer[0] not in ("rank", "local")
                }


def _forget_restarted(evidence: RunEvidence) -> None:
    """The recorders know how often torchrun has started their ranks again: as many failures in its console are history."""
    sides = [known.sidecar for known in evidence.ranks.values() if known.sidecar is not None]
    counts = [int(side.launch["restart"]) for side in sides if side.launch.get("restart", "").isdigit()]
    for text in evidence.texts:
        if text.endings.is_elastic and text.endings.has_failed and text.endings.attempts < min(counts, default=0):
            text.forget_attempt()


def _without_ranks_noise(job: RankLog | None) -> RankLog | None:
    """The job's log, if anything is in it."""
    return job if job is not None and (job.tail or job.events) else None
