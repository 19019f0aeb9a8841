"""A store: can a run be saved there, will two jobs notice each other, how fast is it, does its clock agree?"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_ckpt.cli.examine.finding import Finding
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import TitanError
from titan_ckpt.location import local_path, run_location
from titan_ckpt.store.base import ObjectInfo, Store
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store

PROBE_BYTES = 16 << 20
CLOCK_SKEW_S = 60.0  # S3 refuses requests that are signed 15 minutes off; a file server's clock misleads age limits


def examine(url: str) -> Iterator[Finding]:
    """Write, read, list and delete one object of a random name; each step that fails is a finding and ends the examination."""
    try:
        store = open_store(run_location(url).url)
    except TitanError as error:
        yield Finding("fail", "store", str(error), "see docs/stores.md")
        return
    folder, data = f".titan-ckpt-doctor-{secrets.token_hex(8)}", os.urandom(PROBE_BYTES)
    with _no_new_folders(store):
        try:
            yield from _round_trip(store, folder, data)
        except TitanError as error:
            yield Finding(
                "fail", "store", str(error), "see docs/stores.md; -v shows which client and endpoint were used"
            )
        else:
            yield _conditions(store)


@contextmanager
def _no_new_folders(store: Store) -> Iterator[None]:
    """Remove the folders above a local store that the block made, unless something is in them by then."""
    path = Path(local_path(store.url)) if isinstance(store, FileStore) else None
    made = [each for each in (path, *path.parents) if not os.path.lexists(each)] if path is not None else []
    try:
        yield
    finally:
        with suppress(OSError):  # not empty any more, or gone already
            for each in made:
                each.rmdir()


def _round_trip(store: Store, folder: str, data: bytes) -> Iterator[Finding]:
    path = f"{folder}/probe"
    started_s, sent_s = time.monotonic(), time.time()
    written = store.write(path, [data])
    yield Finding("ok", "write", f"{store}: {_rate(time.monotonic() - started_s)}")
    try:
        yield _clock(written, sent_s)
        if path not in {entry.path for entry in store.list(folder)}:
            missing = f"{store}: an object just written is not listed"
            yield Finding("fail", "list", missing, "a store must list what was written; see docs/stores.md")
        started_s = time.monotonic()
        is_same = store.read(path) == data
        found = f"{store}: {_rate(time.monotonic() - started_s)}"
        yield (
            Finding("ok", "read", found)
            if is_same
            else Finding("fail", "read", "other bytes than written", "do not save here")
        )
    finally:
        store.delete([path])


def _conditions(store: Store) -> Finding:
    try:
        honoured = store.honours_conditions()
    except TitanError as error:
        return Finding("fail", "conditional writes", str(error), "see docs/stores.md")
    if honoured:
        return Finding("ok", "conditional writes", "honoured: of two jobs that commit a step at once, one is refused")
    return Finding("warn", "conditional writes", "ignored by this store", "never let two jobs save to one URL")


def _clock(written: ObjectInfo, sent_s: float) -> Finding:
    skew_s = written.modified_s - sent_s
    if abs(skew_s) > CLOCK_SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        found = f"the store's clock is {format_duration(abs(skew_s))} {direction} this machine's"
        return Finding(
            "warn", "clock", found, "set this machine's clock (chrony, ntpd); S3 refuses 15 minutes of difference"
        )
    return Finding("ok", "clock", "agrees with the store's within a minute")


def _rate(seconds: float) -> str:
    return (
        f"{format_size(PROBE_BYTES)} in {format_duration(seconds)} ({format_size(PROBE_BYTES / max(seconds, 1e-9))}/s)"
    )
