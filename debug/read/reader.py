"""Read everything a job left behind into one Run. A damaged file becomes a flag, never an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from titan_ckpt.debug.incident.black_box import HEADER_BYTES, MAGIC, read_heartbeat
from titan_ckpt.debug.incident.gc_off import no_gc
from titan_ckpt.debug.incident.kinds import DumpKind, FlagKind
from titan_ckpt.debug.incident.operation_table import MOST_OPERATIONS
from titan_ckpt.debug.incident.records import (
    MAX_RANK,
    Dump,
    Flag,
    Heartbeat,
    RankLog,
    Run,
)
from titan_ckpt.debug.read.archives.unpack import is_archive, to_unpack, unpacked_archives
from titan_ckpt.debug.read.assemble import RankEvidence, RunEvidence, assemble
from titan_ckpt.debug.read.attempts import keep_newest_attempt, next_began_s
from titan_ckpt.debug.read.black_boxes import BlackBox, RawBox
from titan_ckpt.debug.read.discovery import (
    TEXT_ENDINGS,
    EvidenceFile,
    IncidentFolders,
    evidence_files,
    find_incident_folders,
    read_evidence_file,
)
from titan_ckpt.debug.read.flight_recorder import ParsedDump, parse_dump
from titan_ckpt.debug.read.many_files import Fetch, fetched, is_local, read_texts
from titan_ckpt.debug.read.plain_pickle import looks_like_pickle
from titan_ckpt.debug.read.recorder_files import (
    Exits,
    Sidecar,
    read_error,
    read_exits,
    read_process,
    read_sidecar,
)
from titan_ckpt.debug.read.reports.documents import quoted_lines
from titan_ckpt.debug.read.reports.process_stacks import is_pyspy_json, read_pyspy_json
from titan_ckpt.debug.read.reports.ras import is_ras_json, read_ras_json
from titan_ckpt.debug.read.snapshots import newest_in_json
from titan_ckpt.debug.read.text_files import (
    NOTES,
    finish_texts,
    is_json_lines,
    is_streamed,
    stream_text,
    take_live_process,
    take_process,
    take_quoted,
    take_report,
    take_text,
)
from titan_ckpt.errors import CheckpointError, NotFoundError, StoreError, TitanError, UnsafeContentError
from titan_ckpt.location import StrPath, absence, local_path, scheme
from titan_ckpt.parsing.json_values import JsonValue, parse_json
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store

OnRead = Callable[[int, int], object]  # bytes that are read, bytes to read


def open_run(
    url: StrPath,
    *,
    store: Store | None = None,
    incident: str | None = None,
    storage_options: Options = None,
    on_read: OnRead | None = None,
) -> Run:
    """Read the newest incident at `url`: a run, an incident folder, a bare folder of dumps or logs, or one dump file.

    `Run.incidents` names the incidents where there are several, oldest first; `incident` chooses one of them.
    Archives there are read as if they were unpacked. `on_read` is called with the bytes that are read and their total, in step
    with the reading. NotFoundError if nothing is there, TitanError if nothing there is evidence.
    """
    with using(storage_options, url if store is None else store):
        store, only = _open(url, store)
    place, found, packed = _look(store, only, incident)
    if not packed:
        return _read_run(RunEvidence(store=store), place, found, only, on_read=on_read)
    flags: list[Flag] = []
    has_others = any(not is_archive(file.path) for file in found)
    with unpacked_archives(store, packed, flags, is_only=only is not None, has_others=has_others) as inside:
        place, found = _evidence(inside, None, incident)
        loose = [file for file in found if not is_archive(file.path)]
        return _read_run(RunEvidence(store=inside, flags=flags), place, loose, on_read=on_read)


def _look(
    store: Store, only: str | None, incident: str | None
) -> tuple[IncidentFolders, list[EvidenceFile], list[EvidenceFile]]:
    """Where to look, the files there, and the archives, which may hold further incidents."""
    try:
        place, found = _evidence(store, only, incident)
    except NotFoundError:
        packed = to_unpack(evidence_files(store, _ONE)) if incident is not None else []
        if not packed:
            raise
        return _ONE, [], packed
    is_one_of_several = place.incidents and not place.folders[0].startswith("debug/")
    return place, found, to_unpack(evidence_files(store, _ONE) if is_one_of_several else found)


def _evidence(store: Store, only: str | None, incident: str | None) -> tuple[IncidentFolders, list[EvidenceFile]]:
    """Where to look, and the files there: of the incident that is asked for, or else of the newest."""
    place = _ONE if only is not None else find_incident_folders(store, incident)
    return place, [file for file in evidence_files(store, place) if only is None or file.path == only]


def _read_run(
    evidence: RunEvidence,
    place: IncidentFolders,
    found: Sequence[EvidenceFile],
    only: str | None = None,
    *,
    on_read: OnRead | None = None,
) -> Run:
    evidence.until_s = next_began_s(evidence.store, place)
    with no_gc():
        keep = _operations_per_box(found)
        tails = [file for file in found if keep and file.path.endswith(".box")]
        together = MOST_OPERATIONS // max(keep, 1)
        for start in range(0, len(tails), together):
            _read_tails(evidence, tails[start : start + together], keep)
        rest = [file for file in found if not (keep and file.path.endswith(".box"))]
        if on_read is not None:
            evidence.on_bytes = _counted(on_read, sum(file.size_bytes for file in rest))
        _read_all(evidence, sorted(rest, key=_reading_order))
        if not evidence.num_evidence:
            evidence.has_notes_only = True
            _read_all(evidence, [file for file in found if file.path.endswith(NOTES)])
        keep_newest_attempt(evidence)
        finish_texts(evidence)
        if evidence.num_evidence == 0:
            raise _nothing(evidence, place.folders, only)
        return assemble(evidence, place.incident, place.incidents)


def _counted(on_read: OnRead, total_bytes: int) -> Callable[[int], None]:
    done = 0

    def on_bytes(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        on_read(done, total_bytes)

    return on_bytes


_ONE = IncidentFolders(incident="", folders=("",), incidents=())


def _open(url: StrPath, store: Store | None) -> tuple[Store, str | None]:
    """The store, and the one file to read where the URL names a file."""
    if store is not None:
        return store, None
    store = open_store(url)
    is_local_file = scheme(store.url) == "file"
    if is_local_file or is_archive(store.url):
        folder, _, name = (local_path(store.url) if is_local_file else store.url).rpartition("/")
        parent = open_store(folder or "/")
        if parent.exists(name):
            return parent, name
    return store, None


def _nothing(evidence: RunEvidence, folders: tuple[str, ...], only: str | None) -> TitanError:
    store = evidence.store
    if evidence.flags:
        first, count = evidence.flags[0], len(evidence.flags)
        files = "1 damaged file" if count == 1 else f"{count} damaged files, first"
        why = first.text.removeprefix(f"{first.source}: ")
        return TitanError(f"{store}: nothing readable: {files}: {first.source}: {why}")
    if only is not None:
        path = f"{str(store).rstrip('/')}/{only}"
        return NotFoundError(
            f"{path} is no dump, stack, black box, log or archive of these; give one, or a folder of them"
        )
    where = ", ".join(folder or "the folder itself" for folder in folders) or "no debug/ or logs/ folder"
    if why := absence(store.url):
        return NotFoundError(f"{store}: {why}")
    return NotFoundError(
        f"{store}: no dump, stack, black box or log found ({where}). Give a run's URL, a folder of Flight Recorder dumps "
        "(TORCH_NCCL_DEBUG_INFO_TEMP_FILE names it), or a folder of logs"
    )


def _reading_order(file: EvidenceFile) -> tuple[bool, bool, bool, str]:
    """Sidecars first (they date the run); JSON twins after pickles (they hold less); launchers' logs after the ranks'."""
    return not file.stem.endswith(".sidecar"), file.suffix == ".json", file.rank is None, file.path


MOST_BOX_OPERATIONS, LEAST_BOX_OPERATIONS = 1 << 19, 32
MANY_BOXES = 256


def _operations_per_box(found: Sequence[EvidenceFile]) -> int:
    """How many operations to read of each black box; 0: all."""
    boxes = sum(file.path.endswith(".box") for file in found)
    return max(LEAST_BOX_OPERATIONS, MOST_BOX_OPERATIONS // boxes) if boxes > MANY_BOXES else 0


def _read_tails(evidence: RunEvidence, found: Sequence[EvidenceFile], keep: int) -> None:
    """The newest operations of many black boxes."""
    raw: list[tuple[EvidenceFile, RawBox]] = []
    for file in found:
        try:
            raw.append((file, evidence.boxes.read_tail(evidence.store, file.path, keep)))
        except _DAMAGE as error:
            _flag(evidence, file, error)
    for (file, _), box in zip(raw, evidence.boxes.finish([box for _, box in raw], keep), strict=True):
        try:
            _take_box(evidence, file, box)
        except _DAMAGE as error:
            _flag(evidence, file, error)


def _read_all(evidence: RunEvidence, files: Sequence[EvidenceFile]) -> None:
    """Read all files, those that look like text last."""
    texts = [file for file in files if file.suffix in TEXT_ENDINGS]
    others = [file for file in files if file.suffix not in TEXT_ENDINGS]
    if is_local(evidence.store):
        for file in others:
            _read(evidence, file)
        read_texts(evidence, texts, _read)
    else:
        for file, fetch in fetched(evidence.store, [*others, *texts], is_streamed):
            _read(evidence, file, fetch)


def _read(evidence: RunEvidence, file: EvidenceFile, fetch: Fetch | None = None) -> None:
    try:
        if is_streamed(file):
            stream_text(evidence, file)
        else:
            _take(evidence, file, fetch() if fetch else read_evidence_file(evidence.store, file))
            evidence.on_bytes(file.size_bytes)
    except _DAMAGE as error:
        _flag(evidence, file, error)


_DAMAGE = (CheckpointError, StoreError, ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)


def _flag(evidence: RunEvidence, file: EvidenceFile, error: Exception) -> None:
    """A file that cannot be read or understood becomes a flag."""
    name, text = FlagKind.DUMP_CORRUPT, f"{error}"[:300]
    if isinstance(error, UnsafeContentError):
        text = f"refused: {error}"
    elif isinstance(error, StoreError):
        name, text = FlagKind.DUMP_MISSING, f"cannot be read: {error}"[:300]
    evidence.flag(name, text, file.path, file.rank)


_LIST_OF_OBJECTS = re.compile(rb"\s{0,100}\[\s{0,100}\{\s{0,100}[\"}]")


def _take(evidence: RunEvidence, file: EvidenceFile, data: bytes) -> None:
    if file.suffix == ".svg" or not data:
        if file.rank is not None and not data and file.suffix in ("", ".pickle", ".pkl", ".json", ".box"):
            why = "is cut off: nothing of it can be unpacked" if file.size_bytes else "is empty"
            evidence.flag(FlagKind.DUMP_CORRUPT, f"{file.path}: {why}", file.path, file.rank)
        elif file.suffix in TEXT_ENDINGS:
            take_text(evidence, file, b"")
        return
    if data.startswith(MAGIC) or file.suffix == ".box":
        _take_box(evidence, file, evidence.boxes.parse(data, file.path))
    elif looks_like_pickle(data[:2]):
        _take_dump(evidence, file, data)
    elif file.suffix == ".json" or data[:1] == b"{" or _LIST_OF_OBJECTS.match(data[:4096]):
        _take_json(evidence, file, data)
    elif file.suffix in (".pickle", ".pkl") or (
        file.suffix == "" and b"\0" in data[:4096] and file.last_number is not None
    ):
        raise ValueError("is no pickle (wrong first bytes)")
    else:
        take_text(evidence, file, data)


def _rank(evidence: RunEvidence, rank: int) -> RankEvidence:
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank {rank} is not possible")
    evidence.num_evidence += 1
    return evidence.ranks[rank]


def _take_dump(evidence: RunEvidence, file: EvidenceFile, data: bytes) -> None:
    named = file.rank if file.rank is not None else file.last_number
    rank = file.folder_number if named is None else named
    if rank is None:
        raise ValueError("the file's name has no rank (expected rank_N or ..._rank_N)")
    file = replace(file, rank=rank)
    parsed = parse_dump(data, rank, evidence.interner)
    if named is None and not any(rank in group.members for group in parsed.groups.values()):
        raise ValueError(
            f"the file's name has no rank (expected rank_N), and no group has rank {rank}, as its folder is called"
        )
    record = _rank(evidence, rank)
    evidence.read_stems[rank, file.stem] = int(parsed.operations["seq"][parsed.operations["p2p"] == 0].max(initial=0))
    _note_dump(evidence, file, parsed)
    record.known_groups.update(
        {g.name: g for g in parsed.groups.values() if g.members and g.name and rank in g.members}
    )
    record.dumps.append((_dump_record(file, parsed), parsed.operations))


def _dump_record(file: EvidenceFile, parsed: ParsedDump) -> Dump:
    return Dump(
        source=file.path, kind=DumpKind.FLIGHT_RECORDER, reason=file.reason, version=parsed.version,
        num_operations=len(parsed.operations), first_record_id=parsed.first_record_id,
        time_s=file.modified_s, is_truncated=not parsed.is_whole,
    )  # fmt: skip


def _note_dump(evidence: RunEvidence, file: EvidenceFile, parsed: ParsedDump) -> None:
    assert file.rank is not None
    if not parsed.is_whole:
        evidence.first_record[file.rank] = parsed.first_record_id
    if not parsed.has_usable_groups:
        evidence.unusable_groups.add(file.rank)


def _take_box(evidence: RunEvidence, file: EvidenceFile, box: BlackBox) -> None:
    record = _rank(evidence, box.rank)
    record.box, record.box_source, record.heartbeat = box, file.path, box.heartbeat
    record.known_groups.update({group.name: group for group in box.groups if group.members})
    evidence.world_size = max(evidence.world_size, box.world_size)


def _take_json(evidence: RunEvidence, file: EvidenceFile, data: bytes) -> None:
    if (twin := evidence.read_stems.get((file.rank, file.stem))) is not None and newest_in_json(data) <= twin:
        return  # the pickle of the same snapshot has the same, with call stacks
    if not data.lstrip().startswith((b"{", b"[")):
        return  # nothing that is known
    if is_json_lines(data):
        take_text(evidence, file, data)
        return
    try:
        value = parse_json(data, file.path)
    except CheckpointError:
        if file.suffix not in TEXT_ENDINGS:
            raise
        take_text(evidence, file, data)  # a log whose first line is an object, or looks like one
        return
    document = JsonValue(value, file.path)
    kind = value.get("titan_ckpt") if isinstance(value, dict) else None
    if kind == "sidecar":
        _take_sidecar(evidence, read_sidecar(document))
    elif kind == "error":
        event = read_error(document, file.path)
        _rank(evidence, event.rank).logs.append(RankLog(source=file.path, events=(event,)))
    elif kind == "exits":
        _take_exits(evidence, read_exits(document, file.path))
    elif kind == "process":
        take_live_process(evidence, read_process(document))
    elif is_pyspy_json(document):
        take_process(evidence, file, read_pyspy_json(document, file.path))
    elif isinstance(value, dict) and is_ras_json(document):
        take_report(evidence, read_ras_json(document, file.path))
    elif isinstance(value, dict) and ("entries" in value or "pg_config" in value):
        _take_dump(evidence, file, data)
    elif (lines := quoted_lines(value)) is not None:
        take_quoted(evidence, file, lines)


def _take_sidecar(evidence: RunEvidence, sidecar: Sidecar) -> None:
    record = _rank(evidence, sidecar.rank)
    record.sidecar = sidecar
    if sidecar.started_s is not None:
        evidence.started_s = min(sidecar.started_s, evidence.started_s or sidecar.started_s)
    evidence.recorded_ranks = max(evidence.recorded_ranks, sidecar.world_size)
    evidence.world_size = max(evidence.world_size, sidecar.world_size)
    record.known_groups.update({group.name: group for group in sidecar.groups})


def _take_exits(evidence: RunEvidence, found: Exits) -> None:
    evidence.num_evidence += 1
    evidence.world_size = max(evidence.world_size, found.world_size)
    evidence.exits += found.exits
    for rank, state in found.states.items():
        evidence.ranks[rank].process_state = state
        evidence.ranks[rank].process_pid = found.pids.get(rank)
    evidence.launcher = found.launcher or evidence.launcher


def read_box_heartbeat(store: Store, path: str) -> Heartbeat | None:
    """Only the heartbeat of a box, by one small read; None when it is no box (yet)."""
    try:
        head = store.read(path, 0, HEADER_BYTES)
    except StoreError:
        return None
    return read_heartbeat(head, path) if head.startswith(MAGIC) else None
