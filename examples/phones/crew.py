"""How peers find each other, without a server: each looks at every address of a book, and the first that waits calls the others.

A crew lives until one of its ranks fails or a stranger is seen; then all return here, and the next crew forms of those that
can be reached. No vote is needed: a stage yields the same whoever computes it, so two crews that cannot see each other do
work twice, never wrongly. Peers whose tasks differ never meet.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from examples.phones.desk import FINISHED, WAITING, WORKING, Call, Desk, Status, ask
from examples.phones.task import differences
from titan_ckpt.errors import UsageError

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
    """Wait until this peer belongs to a new crew; None once another one has brought the result. UsageError: `check_task`."""
    desk.status.state = WAITING
    looks: list[dict[str, str]] = []
    warned = False
    while desk.labels is None:
        try:
            return desk.calls.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            pass
        found = look(book)
        looks = [*looks[1 - SETTLED_LOOKS :], {address: status.state for address, status in found.items()}]
        if looks != looks[-1:] * SETTLED_LOOKS:
            continue
        others = check_task(desk.status.task, found)
        if others and not warned:
            log.warning("works without peers that have another task: %s", "; ".join(others))
            warned = True
        mine = {address: status for address, status in found.items() if status.task == desk.status.task}
        waiting = [address for address, status in mine.items() if status.state == WAITING]
        if waiting[:1] == [desk.address] and not any(status.state == WORKING for status in mine.values()):
            generation = 1 + max(status.generation for status in mine.values())
            port = free_port(desk.address)
            call_all(Call(generation=generation, members=tuple(waiting), rendezvous_port=port, task=desk.status.task))
    return None


def check_task(task: Mapping[str, Any], found: Mapping[str, Status]) -> list[str]:
    """The peers that have another task than this one, each with what differs. UsageError if it is this one that must go.

    The task that most peers have goes on; of equal numbers that of peers at work, then that of the first peer in the book.
    """
    groups: list[list[Status]] = []
    for status in found.values():
        group = next((each for each in groups if each[0].task == status.task), None)
        if group is None:
            groups.append([status])
        else:
            group.append(status)
    best = max(groups, default=[], key=lambda group: (len(group), any(each.state == WORKING for each in group)))
    others = [
        f"{address} has {differences(task, status.task)}" for address, status in found.items() if status.task != task
    ]
    if best and best[0].task != task:
        raise UsageError(
            f"this peer's task differs from that of others: {'; '.join(others)}. Start all with the same --album and --choices"
        )
    return others


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
        status.task == desk.status.task
        and (status.state == WAITING or (status.state == WORKING and status.leader != desk.address))
        for address, status in look([address for address in book if address not in call.members]).items()
    )


def tell_labels(labels: list[int], desk: Desk, book: Sequence[str]) -> None:
    """Bring the result to every peer that can be reached."""
    desk.status.state = FINISHED
    for address in book:
        if address != desk.address:
            try:
                ask(address, "POST", "/labels", {"task": desk.status.task, "labels": labels}, timeout_s=HELLO_S)
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
