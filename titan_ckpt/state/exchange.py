"""Small exchanges between the ranks of a job, over a gloo group of their own, and errors that cross ranks."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from titan_ckpt.errors import FAILED, INTERNAL, SaveError, TitanError
from titan_ckpt.location import redact_text

log = logging.getLogger(__name__)
PATIENCE_S, LONGEST_NAP_S, SHOWN = 10.0, 0.2, 8
_ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*: ")
MAX_TEXT, MAX_LINE = 32 << 10, 4 << 10
"""Characters of an error, and of one of its lines, that other ranks and logs get."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Purpose:
    """What ranks exchange words for, as errors name it: the verb, the class of the errors, the option that bounds it."""

    verb: str
    error: type[TitanError]
    option: str
    after_loss: str


SAVING = Purpose(
    verb="save",
    error=SaveError,
    option="SaveOptions(timeout_s=)",
    after_loss="Nothing more is saved by this saver. If a process has died, restart the job; it resumes from the newest "
    "checkpoint. If one was only slow, make a new Saver with a longer SaveOptions(timeout_s=)",
)


class RankGroup:
    """All ranks of the default process group, or this process alone if there is none. Creating it is a collective call.

    SaveError (or the `purpose`'s own) if a rank does not come, or is gone: then this rank's connections are closed, so that the
    others hear of it at once even if they were not waiting for the lost rank, and every later call fails.
    """

    def __init__(self, *, timeout_s: float, purpose: Purpose = SAVING) -> None:
        self._group: dist.ProcessGroup | None = None
        self._lost, self._purpose = "", purpose
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            meet(self.rank, self.world_size, timeout_s=timeout_s, purpose=purpose)
            with self._all_there():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        with self._all_there():
            if self._group is None:
                return [value]
            values: list[Any] = [None] * self.world_size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every rank's value on the coordinator, an empty list elsewhere."""
        with self._all_there():
            if self._group is None:
                return [value]
            values: list[Any] | None = [None] * self.world_size if self.is_coordinator else None
            dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def scatter(self, values: list[T]) -> T:
        """The coordinator's `values[rank]`, on each rank."""
        with self._all_there():
            if self._group is None:
                return values[0]
            received: list[Any] = [None]
            dist.scatter_object_list(received, values if self.is_coordinator else None, src=0, group=self._group)
        result: T = received[0]
        return result

    def broadcast(self, value: T) -> T:
        """The coordinator's value, on every rank."""
        with self._all_there():
            if self._group is None:
                return value
            values = [value]
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def send(self, data: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to send bytes in host memory, which must stay as they are until the work is done."""
        work = dist.isend(data, dst=rank, group=self._group, tag=tag)
        assert work is not None  # None is for ranks outside of the group
        return work

    def receive(self, data: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """Begin to receive into host memory."""
        work = dist.irecv(data, src=rank, group=self._group, tag=tag)
        assert work is not None
        return work

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        """Turn gloo's error in an exchange into one that says what to do, and leave the group."""
        if self._lost:
            raise self._purpose.error(self._lost)
        try:
            yield
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # they hold the group, whose connections would stay open
            self._lost = (
                f"rank {self.rank} has lost other ranks of the job in a {self._purpose.verb}: {text_of(error, MAX_LINE)}\n"
                f"{self._purpose.after_loss}"
            )
            self.close()
            raise self._purpose.error(self._lost) from error

    def close(self) -> None:
        """Destroy the process group."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def meet(rank: int, world_size: int, *, timeout_s: float, purpose: Purpose = SAVING) -> None:
    """Wait until every rank of the job has come here, through the job's key-value store; name those who do not.

    The purpose's error after `timeout_s`. A group of a rank that is gone cannot be made, and gloo does not say which one it
    misses.
    """
    verb = purpose.verb
    store = dist.PrefixStore(
        "titan_ckpt/ranks" if purpose is SAVING else f"titan_ckpt/ranks/{verb}", _get_default_store()
    )
    began, nap_s, is_said = time.monotonic(), 0.001, False
    try:
        round_of = (store.add("arrived", 1) - 1) // world_size
        store.set(f"{round_of}/{rank}", "here")
        while store.add("arrived", 0) < (round_of + 1) * world_size:
            waited_s = time.monotonic() - began
            if waited_s > (timeout_s if is_said else min(PATIENCE_S, timeout_s)):
                missing = [str(each) for each in range(world_size) if not store.check([f"{round_of}/{each}"])]
                shown = ", ".join(missing[:SHOWN]) + (", ..." if missing[SHOWN:] else "")
                what = f"{len(missing)} of {world_size} ranks have not begun to {verb} after {waited_s:.0f} s (rank {shown})"
                if waited_s > timeout_s:
                    store.add("arrived", -1)
                    raise purpose.error(f"{what}. Every rank must {verb}; if their processes are gone, restart the job")
                log.warning("%s: are they slow, or gone? Waiting up to %g s (%s)", what, timeout_s, purpose.option)
                is_said = True
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
    except RuntimeError as error:
        raise purpose.error(
            f"rank {rank} cannot reach the key-value store of the job: {text_of(error, MAX_LINE)}. It is in the process of rank "
            "0 or of the launcher, which may be gone: restart the job; it resumes from the newest checkpoint"
        ) from error


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of one rank, as sent to the others; `text` is its traceback, `exit_code` says whether it was expected."""

    rank: int
    text: str
    exit_code: int = FAILED


def raise_failures(failures: Sequence[Failure | None], what: str) -> None:
    """SaveError, with the first traceback as a note, if any rank failed."""
    found = [failure for failure in failures if failure is not None]
    if found:
        raise save_error(found, what)


def save_error(failures: Sequence[Failure], what: str) -> SaveError:
    """The error that every rank raises: which ranks failed, and the first one's reason; its traceback is a note."""
    ranks, first = ", ".join(str(failure.rank) for failure in failures), failures[0]
    error = SaveError(f"{what} failed on rank {ranks}: {reason_of(first.text)}")
    error.exit_code = first.exit_code  # type: ignore[misc]  # that of a bug, if it was one
    error.add_note(f"On rank {first.rank}:\n{first.text}")
    return error


def raise_on_all(ranks: RankGroup, error: BaseException | None, what: str) -> None:
    """Raise on every rank if any has an `error`: its own there, SaveError elsewhere. A collective call."""
    failures = ranks.all_gather(None if error is None else failure_of(ranks.rank, error))
    if error is not None:
        raise error
    raise_failures(failures, what)


def reason_of(text: str) -> str:
    """The error line of a traceback, without the module of the error's class.

    >>> reason_of("Traceback (most recent call last):\\n  File ...\\ntitan_ckpt.errors.StoreError: s3://b: no room\\n")
    'StoreError: s3://b: no room'
    """
    named = [line for line in text.splitlines() if _ERROR_LINE.match(line)]
    if not named:
        return next((line for line in reversed(text.splitlines()) if line.strip()), "no reason given")
    name, _, message = named[-1].partition(":")
    return f"{name.rpartition('.')[2]}:{message}"


def failure_of(rank: int, error: BaseException) -> Failure:
    """An exception as a Failure of `rank`, cut and without secrets. Never raises, whatever the exception's own methods do."""
    try:
        text = "".join(traceback.format_exception(error))
        if len(text) > MAX_TEXT:
            text = f"{text_of(text)}\n{text_of(''.join(traceback.format_exception_only(error)), MAX_LINE)}\n"
        else:
            text = text_of(text)
        return Failure(rank, text, exit_code_of(error))
    except BaseException:  # noqa: BLE001  (the other ranks must hear something)
        return Failure(rank, f"{type(error).__name__}: its text could not be made\n")


def exit_code_of(error: BaseException) -> int:
    """The error's own; 3 for what the machine or its peers did (memory, network, files) and for an interrupt, else 70: a bug."""
    if isinstance(error, TitanError):
        return error.exit_code
    outside = OSError | MemoryError | torch.OutOfMemoryError | dist.DistError | KeyboardInterrupt
    return FAILED if isinstance(error, outside) else INTERNAL


def text_of(error: object, most: int = MAX_TEXT) -> str:
    """An error as text for other ranks and for logs: without secrets, at most `most` characters, long lines cut.

    It is cut before secrets are hidden, which takes seconds in megabytes, and again after, lest the first cut halved one.

    >>> text_of("E: " + "x" * 5000)[4090:]
    'xxxxxx... (5003 characters)'
    """
    return shortened(redact_text(shortened(str(error), 4 * most, 4 * MAX_LINE)), most)


def shortened(text: str, most: int = MAX_TEXT, longest: int = MAX_LINE) -> str:
    """The first `most` characters of `text`, and of each line the first `longest`."""
    lines = (text if len(text) <= most else f"{text[:most]}\n... ({len(text)} characters)").split("\n")
    return "\n".join(
        line if len(line) <= longest else f"{line[:longest]}... ({len(line)} characters)" for line in lines
    )
