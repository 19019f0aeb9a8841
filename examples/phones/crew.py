"""How peers find each other, without a server: each looks at every address of a book, and the first that waits calls the others.

A crew lives until one of its ranks fails or a stranger is seen; then all return here, and the next crew forms of those that
can be reached. No vote is needed: a stage yields the same whoever computes it, so two crews that cannot see each other do
work twice, never wrongly.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict

from examples.phones.desk import FINISHED, WAITING, WORKING, Call, Desk, Status, ask

log = logging.getLogger(__name__)
LOOK_EVERY_S = 0.5
SETTLED_LOOKS = 3  # equal looks in a row before the first peer calls
HELLO_S = 2.0


def look(book: Sequence[str]) -> dict[str, Status]:
    """The peers that answer, in the order of the book."""
    found = {}
    for address in book:
        try:
            answer = ask(address, "GET", "/hello", timeout_s=HELLO_S)
        except OSError:
            continue
        if answer is not None:
            found[address] = Status(**json.loads(answer))
    return found


def next_call(desk: Desk, book: Sequence[str]) -> Call | None:
    """Wait until this peer belongs to a new crew; None once another one has brought the result."""
    desk.status.state = WAITING
    looks: list[list[str]] = []
    while desk.labels is None:
        try:
            return desk.calls.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            pass
        found = look(book)
        waiting = [address for address, status in found.items() if status.state == WAITING]
        are_busy = any(status.state == WORKING for status in found.values())
        looks = [*looks[1 - SETTLED_LOOKS :], waiting]
        is_settled = looks == [waiting] * SETTLED_LOOKS
        if waiting[:1] == [desk.address] and is_settled and not are_busy:
            generation = 1 + max(status.generation for status in found.values())
            call_all(Call(generation=generation, members=tuple(waiting), rendezvous_port=free_port(desk.address)))
    return None


def call_all(call: Call) -> None:
    """Call every member. One that does not come lets the crew fail at its first meeting, and the next forms without it."""
    for address in call.members:
        try:
            ask(address, "POST", "/call", asdict(call), timeout_s=HELLO_S)
        except OSError as error:
            log.warning("%s did not take the call: %s", address, error)


def sees_stranger(desk: Desk, call: Call, book: Sequence[str]) -> bool:
    """Whether a peer waits, or works in another crew. For rank 0 of a crew, which then lets its crew form anew."""
    return any(
        status.state == WAITING or (status.state == WORKING and status.leader != desk.address)
        for address, status in look([address for address in book if address not in call.members]).items()
    )


def tell_labels(labels: list[int], desk: Desk, book: Sequence[str]) -> None:
    """Bring the result to every peer that can be reached."""
    desk.status.state = FINISHED
    for address in book:
        if address != desk.address:
            try:
                ask(address, "POST", "/labels", labels, timeout_s=HELLO_S)
            except OSError as error:
                log.info("%s did not get the result: %s", address, error)


def free_port(address: str) -> int:
    """A port that nobody listens on, of this peer's host."""
    with socket.create_server((address.rpartition(":")[0], 0)) as listener:
        return int(listener.getsockname()[1])


def is_ready(address: str, *, within_s: float) -> bool:
    """Whether a peer answers within that time. For programs that start peers."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if look([address]):
            return True
        time.sleep(0.1)
    return False
