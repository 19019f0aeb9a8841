"""One phone: it takes part in crews until the album is clustered, and survives whatever happens to the others.

    python -m examples.phones.peer --address 127.0.0.1:7001 --book 127.0.0.1:7001,127.0.0.1:7002 --home p1 --album ALBUM

The work of a crew runs in a process of its own, forked from one that has imported everything: however a crew ends, nothing of it
is left. Prints what happens as lines of JSON, the clusters last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from examples.phones.choices import Choices
from examples.phones.crew import next_call, sees_stranger, tell_labels
from examples.phones.desk import WORKING, Call, Desk, Status
from examples.phones.pictures import pictures_in
from examples.phones.settings import AGAIN, DONE, FAILED, FILES, LABELS, UNFIT, Settings
from examples.phones.task import take_home, task_of
from titan_ckpt import TitanError, open_store
from titan_ckpt.errors import ConfigError

WORK = "examples.phones.work"
MOST_FAILURES = 20
LONGEST_S = 86400.0


class PeerError(TitanError):
    """This peer cannot go on; the others can."""


def run_peer(settings: Settings) -> list[int]:
    """Work in one crew after the other; returns the cluster of each picture. PeerError if it or its crews fail."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WORK])
    failures = 0
    status = Status(task=settings.task)
    with Desk(settings.address, open_store(str(settings.home / FILES)), status) as desk:
        while failures < MOST_FAILURES:
            call = next_call(desk, settings.book)
            if call is None:
                assert desk.labels is not None
                return desk.labels
            desk.status.state, desk.status.generation, desk.status.leader = WORKING, call.generation, call.members[0]
            knock = context.Event()
            reason, sender = context.Pipe(duplex=False)
            worker = context.Process(target=enter, args=(settings, call, knock, sender), daemon=True)
            worker.start()
            watch(worker, knock, desk, call, settings)
            if desk.fault is not None or worker.exitcode == UNFIT:
                raise PeerError(f"{settings.address} leaves the others: {desk.fault or reason.recv()}")
            if worker.exitcode == DONE:
                labels: list[int] = json.loads((settings.home / LABELS).read_text())
                tell_labels(labels, desk, settings.book)
                return labels
            failures += worker.exitcode != AGAIN
    raise PeerError(f"{settings.address}: {failures} crews have failed; the log says why")


def watch(worker: BaseProcess, knock: Event, desk: Desk, call: Call, settings: Settings) -> None:
    """Wait for the end of the work; rank 0's peer also looks for others that could join. Kill it if this peer is of no use."""
    is_first = call.members[0] == desk.address
    while worker.is_alive():
        worker.join(settings.look_every_s)
        if desk.fault is not None:
            worker.kill()
        elif is_first and worker.is_alive() and not knock.is_set() and sees_stranger(desk, call, settings.book):
            knock.set()


def enter(settings: Settings, call: Call, knock: Event, reason: Connection) -> None:
    """Start the work in the forked process, which alone has imported torch."""
    die_with_parent()
    from examples.phones.work import work

    work(settings, call, knock, reason)


def die_with_parent() -> None:
    """Let this worker end when the peer's main process dies, however it does: nobody would answer for it in a crew."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(FAILED)

    threading.Thread(target=wait, daemon=True).start()


def read_settings(arguments: Sequence[str]) -> Settings:
    """The command line, checked, with the pictures of the album; UsageError or DataError names what is wrong."""
    parser = argparse.ArgumentParser(description="a phone that clusters an album together with others")
    parser.add_argument("--address", required=True, help="host:port to answer on")
    parser.add_argument("--book", required=True, help="where peers may be, this one too, in the same order everywhere")
    parser.add_argument(
        "--home", required=True, type=Path, help="this peer's folder, for this album and these choices alone"
    )
    parser.add_argument("--album", required=True, type=Path, help="a folder of JPEG files; every peer has the same")
    parser.add_argument("--choices", default="{}", help="fields of Choices that differ from its defaults, as JSON")
    parser.add_argument("--save-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="after which a silent peer counts as gone"
    )
    parser.add_argument("--look-every", type=float, default=5.0, metavar="SECONDS", help="how often to look for others")
    options = parser.parse_args(arguments)
    choices, pictures = Choices.read(options.choices), tuple(pictures_in(options.album))
    return Settings(
        address=options.address, book=_book(options.book, options.address), home=options.home, pictures=pictures,
        choices=choices, save_every_s=_seconds("--save-every", options.save_every, least=0.0),
        timeout_s=_seconds("--timeout", options.timeout, least=1.0),
        look_every_s=_seconds("--look-every", options.look_every, least=0.1), task=task_of(pictures, choices),
    )  # fmt: skip


def _book(text: str, address: str) -> tuple[str, ...]:
    """The addresses of the book; ConfigError if one is none, or this peer's is missing: no crew would ever find it."""
    book = tuple(each.strip() for each in text.split(","))
    for each in (address, *book):
        host, _, port = each.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{each!r}: expected an address host:port")
    if address not in book:
        raise ConfigError(f"--address {address} is not in --book {text}; add it, in the same place on every peer")
    return book


def _seconds(option: str, value: float, *, least: float) -> float:
    if not least <= value <= LONGEST_S:
        raise ConfigError(f"{option} is {value}; expected {least} to {LONGEST_S:.0f} seconds")
    return value


def main(arguments: Sequence[str]) -> int:
    """Cluster the album. Prints the clusters with the pictures' names."""
    try:
        settings = read_settings(arguments)
        take_home(settings.home, settings.task)
        labels = run_peer(settings)
    except TitanError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    names = [path.name for path in settings.pictures]
    print(json.dumps({"event": "labels", "labels": labels, "pictures": names}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
