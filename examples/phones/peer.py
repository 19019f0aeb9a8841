"""One phone: it takes part in crews until the album is clustered, and survives whatever happens to the others.

    python -m examples.phones.peer --address 127.0.0.1:7001 --book 127.0.0.1:7001,127.0.0.1:7002 --home p1 --album ALBUM

The work of a crew runs in a process of its own, forked from one that has imported everything: however a crew ends, nothing of it
is left. Prints what happens as lines of JSON, the clusters last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from examples.phones.choices import Choices
from examples.phones.crew import next_call, sees_stranger, tell_labels
from examples.phones.desk import WORKING, Call, Desk
from examples.phones.settings import AGAIN, DONE, FILES, LABELS, Settings
from titan_ckpt import open_store

WORK = "examples.phones.work"
MOST_FAILURES = 20


def run_peer(settings: Settings) -> list[int]:
    """Work in one crew after the other; returns the cluster of each picture. RuntimeError if crews keep failing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WORK])
    failures = 0
    with Desk(settings.address, open_store(str(settings.home / FILES))) as desk:
        while failures < MOST_FAILURES:
            call = next_call(desk, settings.book)
            if call is None:
                assert desk.labels is not None
                return desk.labels
            desk.status.state, desk.status.generation, desk.status.leader = WORKING, call.generation, call.members[0]
            knock = context.Event()
            worker = context.Process(target=enter, args=(settings, call, knock), daemon=True)
            worker.start()
            watch(worker, knock, desk, call, settings)
            if worker.exitcode == DONE:
                labels: list[int] = json.loads((settings.home / LABELS).read_text())
                tell_labels(labels, desk, settings.book)
                return labels
            failures += worker.exitcode != AGAIN
    raise RuntimeError(f"{settings.address}: {failures} crews have failed; the log says why")


def watch(worker: BaseProcess, knock: Event, desk: Desk, call: Call, settings: Settings) -> None:
    """Wait for the end of the work; rank 0's peer also looks for others that could join."""
    if call.members[0] == desk.address:
        while worker.is_alive() and not knock.is_set():
            worker.join(settings.look_every_s)
            if worker.is_alive() and sees_stranger(desk, call, settings.book):
                knock.set()
    worker.join()


def enter(settings: Settings, call: Call, knock: Event) -> None:
    """Start the work in the forked process, which alone has imported torch."""
    from examples.phones.work import work

    work(settings, call, knock)


def read_settings() -> Settings:
    """The command line."""
    parser = argparse.ArgumentParser(description="a phone that clusters an album together with others")
    parser.add_argument("--address", required=True, help="host:port to answer on")
    parser.add_argument("--book", required=True, help="where peers may be, this one too, in the same order everywhere")
    parser.add_argument("--home", required=True, type=Path, help="this peer's folder")
    parser.add_argument("--album", required=True, type=Path, help="the pictures; every peer has them")
    parser.add_argument(
        "--choices", type=json.loads, default={}, help="fields of Choices that differ from its defaults"
    )
    parser.add_argument("--save-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="after which a silent peer counts as gone"
    )
    parser.add_argument("--look-every", type=float, default=5.0, metavar="SECONDS", help="how often to look for others")
    options = parser.parse_args()
    return Settings(
        address=options.address, book=tuple(options.book.split(",")), home=options.home, album=options.album,
        choices=Choices(**options.choices), save_every_s=options.save_every, timeout_s=options.timeout,
        look_every_s=options.look_every,
    )  # fmt: skip


def main() -> None:
    """Cluster the album."""
    settings = read_settings()
    settings.home.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"event": "labels", "labels": run_peer(settings)}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
