"""Start the ranks of a run with torch's elastic agent, and explain in one line why they failed.

Every rank runs `python -m titan_ckpt train ...` with torchrun's environment. A failing rank writes `logs/error_R.json`; the
launcher reports the first error that is a cause and not a symptom.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from titan_ckpt.console.output import output_words, write_note
from titan_ckpt.errors import FAILED, DamagedError, TitanError, UsageError
from titan_ckpt.location import redact_text
from titan_ckpt.parsing.json_values import JsonValue, parse_json_line
from titan_ckpt.state.exchange import exit_code_of
from titan_ckpt.store.clients.options import current_settings
from titan_ckpt.trainer.config.train_config import TrainConfig, fixed_world_size
from titan_ckpt.trainer.report.logs import RunFolder
from titan_ckpt.trainer.report.records import METRICS, Event, read_records

log = logging.getLogger(__name__)

LAUNCHED = "TITAN_CKPT_LAUNCHED"
MAX_LOCAL_RANKS = 1024  # processes on one machine
LAST_WORDS_S = 5.0  # a rank reports and exits when save.grace_s is over; if it does not, it is killed this much later
_SYMPTOMS = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Timed out",
    "timed out",
    "timeout",
    "Connection refused",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The error that ended a rank."""

    rank: int
    time_s: float
    kind: str
    message: str
    exit_code: int
    is_ours: bool  # a TitanError, whose text needs no traceback

    @property
    def blame(self) -> tuple[int, float]:
        """Sort key: causes before symptoms, earlier before later."""
        is_symptom = not self.is_ours and any(word in self.message for word in _SYMPTOMS)
        return (2 if is_symptom else 0 if self.is_ours else 1), self.time_s


# torch 2.13: else ranks that are started again share the store of those before them, and gloo connects to addresses of these.
NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class RanksFailedError(TitanError):
    """A rank failed; the message is that rank's error."""

    def __init__(self, error: RankError, text: str) -> None:
        super().__init__(text)
        self.error = error


class StoppedError(TitanError):
    """The ranks did not finish their last checkpoint within save.grace_s."""


def is_rank() -> bool:
    """Whether a launcher (torchrun or ours) started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ)


def refuse_as_rank(given: Collection[str], *options: str) -> None:
    """UsageError if one of `options`, which are for the process that starts the ranks, was given to a rank under torchrun."""
    if found := next((option for option in options if option in given), None):
        error = UsageError(f"{found} has no effect under torchrun, which starts the ranks itself; leave it out")
        tell_torchrun(str(error))
        raise error


def is_launched_here() -> bool:
    """Whether our own launcher started this rank and will report its error."""
    return LAUNCHED in os.environ


LAST_WORDS_S = 2.0


def end_with_launcher(poll_s: float = 1.0) -> None:
    """Exit when the elastic agent is gone (killed, or interrupted twice), since nothing else would end this rank then."""
    launcher = os.getppid()

    def say() -> None:
        log.error("the launcher of this job (process %d) is gone: this rank ends", launcher)

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(poll_s)
        try:
            last_words = threading.Thread(target=say, daemon=True)  # whoever holds a handler's lock may wait for ever
            last_words.start()
            last_words.join(LAST_WORDS_S)
        finally:
            os._exit(3)

    threading.Thread(target=watch, name="titan-ckpt-launcher-watch", daemon=True).start()


def launched_at_s() -> float:
    """Start time of this attempt: the launcher's start for the first attempt under it, else now."""
    return float(os.environ[LAUNCHED]) if is_first_attempt() and LAUNCHED in os.environ else time.time()


def is_first_attempt() -> bool:
    """Whether the launcher has not started these ranks before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def num_ranks(config: TrainConfig, nproc: int | None) -> int:
    """Ranks to start: `nproc`, else what the mesh requires, else the accelerators, rounded to a multiple of the axes."""
    if nproc is not None:
        return nproc
    mesh = config.mesh
    others = mesh.pp * mesh.dp_replicate * mesh.cp * mesh.tp
    return fixed_world_size(config) or max(others, torch.cuda.device_count() // others * others)


def check_ranks(option: str, value: int | None, most: int) -> None:
    """UsageError unless `value`, if it is given, is a number of ranks from 1 to `most`."""
    if value is not None and not 1 <= value <= most:
        raise UsageError(f"{option} {value}: give a whole number from 1 to {most}")


def launch(
    arguments: Sequence[str],
    config: TrainConfig,
    folder: RunFolder,
    *,
    nproc: int,
    restarts: int = 0,
    command: str = "train",
) -> int:
    """Run `titan-ckpt COMMAND ARGUMENTS` on `nproc` ranks; returns 0, or 130 after a signal and a last checkpoint."""
    _clear_errors(folder)
    launched_s = time.time()
    with _environment_of_ranks(nproc, launched_s), _silent_agent():
        launcher = elastic_launch(_launch_config(nproc, restarts, config.save.grace_s), sys.executable)
        try:
            launcher("-m", "titan_ckpt", *output_words(), command, *current_settings().words, *arguments)
        except ChildFailedError as error:
            raise _explain(error, folder) from error
        except SignalException as error:
            return _after_signal(error, folder, launched_s, config.save.grace_s)
        except UnboundLocalError as error:
            # A signal between two lines of torch's timer (elastic/metrics/api.py, `prof`): it fails while it handles that.
            if not isinstance(error.__context__, SignalException):
                raise
            return _after_signal(error.__context__, folder, launched_s, config.save.grace_s)
    return 0


@contextmanager
def _environment_of_ranks(nproc: int, launched_s: float) -> Iterator[None]:
    """Set what the ranks inherit. Afterwards this process has its own environment back: torch's agent changes it, too."""
    before = dict(os.environ)
    os.environ[LAUNCHED] = str(launched_s)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    os.environ[NEW_STORE] = "1"
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _silent_agent() -> Iterator[None]:
    """Silence torch's elastic agent, whose report blames the wrong rank; `_explain` reports in its place."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _launch_config(nproc: int, restarts: int, grace_s: float) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=math.ceil(grace_s + LAST_WORDS_S),
    )


def write_error(folder: RunFolder, rank: int, error: BaseException) -> RankError:
    """Write `error` to a file for the launcher; returns the record."""
    is_ours = isinstance(error, TitanError)
    record = RankError(
        rank=rank,
        time_s=time.time(),
        kind=type(error).__name__,
        message=redact_text(str(error) or traceback.format_exception_only(error)[-1].strip()),
        exit_code=_exit_code(error),
        is_ours=is_ours,
    )
    tell_torchrun(record.message)
    os.makedirs(folder.logs, exist_ok=True)
    with open(folder.error(rank), "w", encoding="utf-8") as file:
        json.dump(asdict(record), file)
    return record


def tell_torchrun(message: str) -> None:
    """Write this rank's error where torchrun looks for it, in the form that its `ProcessFailure` reads; its summary shows it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump({"message": message, "timestamp": int(time.time())}, file)
            os.replace(f"{path}.new", path)  # torchrun fails on half a file


def _exit_code(error: BaseException) -> int:
    """As `exit_code_of`; 3 for what looks like the end of another rank."""
    code = exit_code_of(error)
    is_symptom = not isinstance(error, TitanError) and any(word in str(error) for word in _SYMPTOMS)
    return FAILED if is_symptom else code


def read_errors(folder: RunFolder) -> list[RankError]:
    """The errors that ranks wrote, most likely cause first."""
    names = sorted(n for n in os.listdir(folder.logs) if n.startswith("error_")) if os.path.isdir(folder.logs) else []
    found = []
    for name in names:
        found.append(_read_error(folder.file(name), name))
    return sorted(found, key=lambda error: error.blame)


def _read_error(path: str, name: str) -> RankError:
    """One rank's error; a record that it did not finish stands for an error without a text, after all others."""
    try:
        with open(path, "rb") as file:
            value = JsonValue(parse_json_line(file.read()), path)
        return RankError(
            rank=value["rank"].whole(),
            time_s=value["time_s"].number(),
            kind=value["kind"].text(),
            message=value["message"].text(),
            exit_code=value["exit_code"].whole(most=255),
            is_ours=value["is_ours"].flag(),
        )
    except (DamagedError, ValueError) as error:
        rank = int(digits) if (digits := re.sub(r"\D", "", name)[:6]) else 0
        return RankError(
            rank=rank,
            time_s=math.inf,
            kind="unknown",
            message=f"{name} is damaged: {error}",
            exit_code=FAILED,
            is_ours=False,
        )


def _clear_errors(folder: RunFolder) -> None:
    for error in read_errors(folder):
        clear_error(folder, error.rank)


def clear_error(folder: RunFolder, rank: int) -> None:
    """Remove the error that an earlier attempt of this rank wrote."""
    with suppress(FileNotFoundError):
        os.unlink(folder.error(rank))


def _explain(failed: ChildFailedError, folder: RunFolder) -> TitanError:
    """The error to show for a failed job: a rank's own error, else the signal that killed it."""
    errors = read_errors(folder)
    killed = _killed(failed.failures)
    if errors and (errors[0].blame[0] < 2 or not killed):
        return _as_error(errors[0], folder)
    if (
        errors and "timed out" in errors[0].message.lower()
    ):  # no rank had died before: the agent killed ranks that did not react to SIGTERM
        ranks = ", ".join(str(rank) for rank, _ in killed)
        return _as_error(
            errors[0], folder, f"; rank {ranks} did not answer: `titan-ckpt debug {folder.root}` shows where it was"
        )
    if killed:
        rank, name = killed[0]
        hint = " (often: out of memory)" if name == "SIGKILL" else ""
        text = f"rank {rank} was killed by {name}{hint}; its log is {folder.log(rank)}"
        return RanksFailedError(
            RankError(rank=rank, time_s=0.0, kind=name, message=text, exit_code=3, is_ours=False), text
        )
    rank, failure = failed.get_first_failure()
    text = f"rank {rank} ended with exit code {failure.exitcode} and left no error; see {folder.log(rank)}"
    return RanksFailedError(
        RankError(rank=rank, time_s=0.0, kind="exit", message=text, exit_code=3, is_ours=False), text
    )


def _killed(failures: dict[int, Any]) -> list[tuple[int, str]]:
    """(rank, signal) of ranks killed by a signal other than the agent's own SIGTERM, earliest first."""
    ours = sorted(failures.items(), key=lambda item: item[1].timestamp)
    return [(r, signal.Signals(-f.exitcode).name) for r, f in ours if f.exitcode < 0 and -f.exitcode != signal.SIGTERM]


def _as_error(error: RankError, folder: RunFolder, more: str = "") -> TitanError:
    if error.is_ours:
        text = error.message
    else:
        first = error.message.strip().splitlines()[0]
        text = f"rank {error.rank} failed: {error.kind}: {first}; the traceback is in {folder.log(error.rank)}"
    shown = RanksFailedError(error, text + more)
    shown.exit_code = error.exit_code  # type: ignore[misc]  # the rank's own code is what the job exits with
    return shown


def _after_signal(error: SignalException, folder: RunFolder, launched_s: float, grace_s: float) -> int:
    """130 if the ranks stopped cleanly; else raises the reason."""
    errors = read_errors(folder)
    name = signal.Signals(error.sigval).name
    if errors:
        raise _as_error(errors[0], folder) from error
    events = _events_since(folder, launched_s)
    if Event.START in events and Event.END not in events:
        raise StoppedError(
            f"stopped by {name}, but a rank was still running after save.grace_s = {grace_s:g} s and was killed; "
            "committed checkpoints are intact"
        ) from error
    write_note(f"titan-ckpt: stopped by {name}{'' if Event.START in events else ' before training began'}")
    return 130


def _events_since(folder: RunFolder, time_s: float) -> set[str]:
    """The kinds of records that rank 0 has written since `time_s`."""
    try:
        records = read_records(folder.file(METRICS))
    except FileNotFoundError:
        return set()
    return {str(record["event"]) for record in records if float(record["time_s"]) >= time_s}
