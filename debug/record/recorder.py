"""The in-process recorder: leaves behind what a diagnosis needs, however the process ends.

    recorder = Recorder.start(folder, rank=rank, world_size=world_size)  # any time, best before the first collective
    with recorder.phase("forward", step=12): ...

Files per rank in `folder`: `rank_00003.box` (the black box), `.sidecar.json` (host, pid, groups, mesh coordinates,
clock), and on each occasion (stall, sigterm, exception, demand) `.<occasion>.pickle` (the Flight Recorder's dump) and
`.<occasion>.stacks`. Two parts work without the GIL: the interpreter's C timer writes `.gil.stacks` when something
holds it, and torch's C++ worker server listens on `.sock`. `debug collect` asks at `.ask` for a dump, and at `.sock` if Python
does not answer. Files have mode 0600; one that cannot be written is logged, and training goes on.

Only this module, `hooks`, `progress`, `sidecar` and `worker_server` import torch in this package.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from titan_ckpt.debug.incident.black_box import CAPACITY
from titan_ckpt.debug.incident.kinds import DEMAND, STALL
from titan_ckpt.debug.record.demand import DemandServer
from titan_ckpt.debug.record.earlier import set_aside
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.debug.record.exit_status import forget_in_child
from titan_ckpt.debug.record.hooks import BoxWriter, Hooks, phase_number
from titan_ckpt.debug.record.own_stacks import all_stacks, with_source
from titan_ckpt.debug.record.progress import Progress, main_thread_times, torch_progress
from titan_ckpt.debug.record.sidecar import process_facts
from titan_ckpt.debug.record.signal_reader import SignalReader
from titan_ckpt.debug.record.worker_server import WorkerServer
from titan_ckpt.errors import TitanError, UsageError
from titan_ckpt.location import redact_text
from titan_ckpt.private_files import PrivateFolder
from titan_ckpt.store.open import open_store

log = logging.getLogger(__name__)

DEFAULT_STALL_S = 120.0
TICK_S = 0.25
FREE_TICKS = 8
REARMED = 16  # how often the C timer is set within its own time: setting it costs more than all else in a tick
_IMPORTED_BY_STACKS = ("torch._inductor", "torch._dynamo")


class Recorder:
    """The recorder of this process; one at a time. `start` creates it, `stop` ends it (also at exit)."""

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, coordinates: Mapping[str, int], stall_s: float,
        on_signal: Callable[[int], None] | None, upload: str | None, capacity: int,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.rank = rank
        self._world_size = world_size
        self._coordinates = dict(coordinates)
        self._stall_s = stall_s
        self._on_signal = on_signal
        self._upload = upload
        self._stem = f"rank_{rank:05d}"
        self._files = PrivateFolder(folder)
        set_aside(folder, self._stem)
        self._box = BoxWriter(folder / f"{self._stem}.box", rank=rank, world_size=world_size, capacity=capacity)
        self._box.write_status_at_exit()
        self._hooks = Hooks(self._box)
        self._started_s = time.time()
        self._patience_s = min(max(stall_s, 1.0), 30.0) if stall_s else 0.0
        self._free_ticks, self._ticked_at, self._armed_at = 0, time.monotonic(), 0.0
        self._dump_lock = threading.Lock()
        self._ended = threading.Event()
        self._told: BaseException | None = None
        self._gil_name, self._fatal_name = f"{self._stem}.gil.stacks", f"{self._stem}.fatal.stacks"
        self._gil_file, self._fatal_file = self._open(self._gil_name), self._open(self._fatal_name)
        self._had_faulthandler = faulthandler.is_enabled()
        self._signals: SignalReader | None = None
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        self._server: WorkerServer | None = None
        self._demands: DemandServer | None = None

    @classmethod
    def start(
        cls, folder: str | Path, *, rank: int, world_size: int, coordinates: Mapping[str, int] | None = None,
        stall_s: float | None = None, on_signal: Callable[[int], None] | None = None, upload: str | None = None,
        capacity: int = CAPACITY,
    ) -> Recorder:  # fmt: skip
        """Start recording into the local `folder`.

        `stall_s`: dump if no operation starts or ends, in Python or in C++ (DDP, FSDP), and no phase changes for this long
        (None: 120 s, 0: never).
        `on_signal` is called with the signal number from its own thread when SIGTERM arrives, even while the main
        thread hangs in a collective. Set a flag there; the recorder then never ends the process itself. With neither
        `on_signal` nor a handler in the program, SIGTERM ends the process as usual, once the evidence is on disk.
        `upload`: a URL to copy every dump to, for runs whose folder is not local.
        """
        target = Path(folder)
        seconds = DEFAULT_STALL_S if stall_s is None else stall_s
        if seconds < 0 or rank < 0 or rank >= world_size:
            raise UsageError(f"Recorder.start: rank {rank} of {world_size}, stall_s {seconds}: out of range")
        recorder = cls(
            target, rank=rank, world_size=world_size, coordinates=coordinates or {}, stall_s=seconds, on_signal=on_signal,
            upload=upload, capacity=capacity,
        )  # fmt: skip
        recorder._begin()
        return recorder

    def _begin(self) -> None:
        self._hooks.install()
        self._server = WorkerServer.start(self.folder / f"{self._stem}.sock")
        self._demands = DemandServer.start(self.folder / f"{self._stem}.ask", self.rank, lambda: self.dump(DEMAND))
        self._write_sidecar()
        faulthandler.enable(self._fatal_file)
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalReader((signal.SIGTERM, signal.SIGUSR2), self._hear)
        leave = weakref.WeakMethod(self._leave_in_child)
        os.register_at_fork(after_in_child=lambda: (found := leave()) and found())
        self._spawn("watch", self._watch)
        atexit.register(self._at_exit)

    def _leave_in_child(self) -> None:
        """A forked child has none of our threads: what it inherited must not speak, hear or crash for its parent."""
        if self._ended.is_set():
            return
        forget_in_child()
        self._hooks.remove()
        _restore_faulthandler(self._had_faulthandler)
        if self._signals is not None:
            self._signals.leave_in_child()
        if self._demands is not None:
            self._demands.close_in_child()

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"titan-recorder-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # ------------------------------------------------------------------------------------------- the training loop

    @contextlib.contextmanager
    def phase(self, name: str, step: int) -> Iterator[None]:
        """Put the phase in the heartbeat: data, forward, backward, optimizer, ckpt_stage, ckpt_upload, ckpt_commit."""
        before = self._box.phase
        self._box.set_phase(step, phase_number(name))
        try:
            yield
        finally:
            self._box.set_phase(step, before[1] if before[0] == step else 0)

    def exception(self, error: BaseException) -> None:
        """Dump evidence of an error that is about to end this rank; call it in the `except` block."""
        self._told = error
        value = {
            "titan_ckpt": "error",
            "rank": self.rank,
            "type": type(error).__name__,
            "message": redact_text(str(error))[:2000],
            "time_s": time.time(),
            "frames": [
                [f.filename, f.lineno or 0, f.name, redact_text(f.line or "")]
                for f in reversed(traceback.extract_tb(error.__traceback__))
            ],
        }
        self._attempt(f"{self._stem}.error.json", lambda: json.dumps(value).encode())
        self.dump("exception")

    def dump(self, reason: str) -> None:
        """Write stacks, Flight Recorder ring and sidecar under `reason`; failures are logged, never raised."""
        with self._dump_lock:
            lines = all_stacks()
            written = [
                self._attempt(f"{self._stem}.{reason}.stacks", lambda: "\n".join(lines).encode("utf-8", "replace"))
            ]
            written.append(self._attempt(f"{self._stem}.{reason}.pickle", _flight_recorder_dump))
            self._attempt(f"{self._stem}.{reason}.stacks", lambda: with_source(lines))  # reads files: last, may hang
            self._write_sidecar()
        if self._upload:
            self._copy([*(name for name in written if name), f"{self._stem}.sidecar.json", f"{self._stem}.box"])

    def stop(self) -> None:
        """Stop recording and mark the end of the process as orderly. Idempotent."""
        self._end(is_orderly=True)

    def _at_exit(self) -> None:
        """The interpreter keeps the exception that ends a program in `sys.last_value`, also past a program's own excepthook."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if isinstance(error, Exception) and error is not self._told and os.getpid() == self._pid:
            self.exception(error)
        self._end(is_orderly=error is None)

    def _end(self, *, is_orderly: bool) -> None:
        if self._ended.is_set() or os.getpid() != self._pid:  # a forked child does not own the box
            return
        self._ended.set()
        if self._demands is not None:
            self._demands.stop()
            self._demands = None
        if self._server is not None:
            self._server.stop()
            self._server = None
        if is_orderly:
            self._box.stop()
        self._hooks.remove()
        faulthandler.cancel_dump_traceback_later()
        _restore_faulthandler(self._had_faulthandler)
        if self._signals is not None:
            self._signals.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2)
        self._write_sidecar()
        self._close_files()
        atexit.unregister(self._at_exit)

    def _close_files(self) -> None:
        for name, file in ((self._gil_name, self._gil_file), (self._fatal_name, self._fatal_file)):
            if os.fstat(file.fileno()).st_size == 0:
                self._files.remove(name, file.fileno())
            file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.exception(error)
        self.stop()

    # ------------------------------------------------------------------------------------------------------ files

    def _attempt(self, name: str, make: Callable[[], bytes]) -> str:
        try:
            content = make()
            if content:
                self._files.write(name, content)
                return name
        except (OSError, RuntimeError, ValueError, TitanError) as error:
            log.error("rank %d: %s could not be written: %s", self.rank, name, error)
        return ""

    def _open(self, name: str) -> IO[bytes]:
        """A file that C writes to; one without a name where it cannot be made, so that training goes on."""
        try:
            return open(self._files.create(name), "wb", buffering=0)
        except (OSError, TitanError) as error:
            log.error("rank %d: %s could not be written: %s", self.rank, name, error)
            return open(os.devnull, "wb", buffering=0)

    def _write_sidecar(self) -> None:
        value = {
            "titan_ckpt": "sidecar",
            "rank": self.rank,
            "world_size": self._world_size,
            "coordinates": self._coordinates,
            "started_s": self._started_s,
            "endpoint": self._server.endpoint if self._server else "",
            "ask": self._demands.endpoint if self._demands else "",
            **process_facts(),
        }
        self._attempt(f"{self._stem}.sidecar.json", lambda: json.dumps(value).encode())

    def _copy(self, names: list[str]) -> None:
        try:
            store = open_store(self._upload or "")
            for name in names:
                store.write(name, [self._files.read(name)])
        except (TitanError, OSError) as error:
            log.error("rank %d: evidence stays in %s, uploading it failed: %s", self.rank, self.folder, error)

    # --------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        """Tick the heartbeat, detect stalls, and rearm the C timer that fires when the GIL is held."""
        seen, since, dumped = self._position(), time.monotonic(), False
        ran_ns, queued_ns = main_thread_times()
        self._rearm()
        while not self._ended.wait(TICK_S):
            self._box.beat()
            self._rearm()
            now = self._position()
            times = main_thread_times()
            if now != seen:
                self._box.move()
                ran_ns, queued_ns = times
                if dumped:
                    self._forget_stall()
                seen, since, dumped = now, time.monotonic(), False
            elif self._stall_s and not dumped and time.monotonic() - since > self._stall_s:
                dumped = True
                self._spawn("stall", self._dump_stall)
            self._box.schedule(times[0] - ran_ns, times[1] - queued_ns)

    def _dump_stall(self) -> None:
        """Runs in its own thread: a dump may take long, and the heartbeat must go on."""
        position = self._position()
        self.dump(STALL)
        if self._position() != position:
            self._forget_stall()

    def _position(self) -> tuple[int, tuple[int, int], Progress]:
        return self._hooks.progress(), self._box.phase, torch_progress()

    def _rearm(self) -> None:
        if not self._patience_s:
            return
        self._free_ticks += 1
        if self._gil_file.tell() and self._free_ticks >= FREE_TICKS:  # free again for long enough: a pause, not a hang
            self._gil_file.truncate(0)
            self._gil_file.seek(0)
        if not self._gil_file.tell() or self._tick_was_late():
            self._free_ticks = 0
        if not self._ended.is_set() and time.monotonic() - self._armed_at > self._patience_s / REARMED:
            self._armed_at = time.monotonic()
            faulthandler.dump_traceback_later(self._patience_s, file=self._gil_file)

    def _tick_was_late(self) -> bool:
        """Whether the watching thread could not run for much longer than it slept."""
        before, self._ticked_at = self._ticked_at, time.monotonic()
        return self._ticked_at - before > 4 * TICK_S

    def _forget_stall(self) -> None:
        """Delete the stall dump of a process that resumed: it would only mislead."""
        for suffix in ("stacks", "pickle"):
            self._files.remove(f"{self._stem}.stall.{suffix}")

    # ---------------------------------------------------------------------------------------------------- signals

    def _hear(self, data: bytes, previous: Mapping[int, Any]) -> None:
        """In the signals' thread: `data` are the numbers of signals that arrived, `previous` the program's handlers."""
        if signal.SIGTERM in data:
            if self._on_signal is not None:
                self._on_signal(int(signal.SIGTERM))
            if not self._ended.is_set():
                self.dump("sigterm")
            if self._on_signal is None and previous.get(signal.SIGTERM) == signal.SIG_DFL:
                self._die(signal.SIGTERM)
        elif signal.SIGUSR2 in data and not self._ended.is_set():
            self.dump(DEMAND)

    def _die(self, number: int) -> None:
        """End the process as the signal would without our handler."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)


def _restore_faulthandler(was_enabled: bool) -> None:
    """As it was before the recorder: on stderr, or off."""
    faulthandler.disable()
    if was_enabled:
        with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr is closed, or no file
            faulthandler.enable()


def _flight_recorder_dump() -> bytes:
    """The ring as torch pickles it; empty where this build of torch has none.

    Call stacks are in it only once the program has imported what torch looks them up with (DDP and FSDP do): imported here, in
    another thread, it would make an import that the main thread has begun fail, and so end the program.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    return bytes(dump(True, all(map(_is_imported, _IMPORTED_BY_STACKS)), False)) if dump is not None else b""


def _is_imported(name: str) -> bool:
    """Whether a module is imported to its end."""
    return name in sys.modules and not getattr(sys.modules[name].__spec__, "_initializing", False)


__all__ = ["Recorder", "environment"]
