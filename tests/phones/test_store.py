"""Files on peers: where they are copied, and who answers for whom."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.phones.crew import call_all, check_task, free_port, look, next_call, sees_stranger, tell_labels
from examples.phones.desk import WAITING, WORKING, Call, Desk, Status
from examples.phones.store import SMALL_BYTES, PeersStore
from titan_ckpt import open_store
from titan_ckpt.errors import ConditionFailedError, NotFoundError, StoreError, UsageError

LARGE = bytes(range(256)) * (SMALL_BYTES // 256 + 1)


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[list[Desk]]:
    """Three peers that answer."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Desk(f"127.0.0.1:{free_port('127.0.0.1:0')}", open_store(str(tmp_path / f"peer{number}")))
            )
            for number in range(3)
        ]


def _stores(desks: list[Desk]) -> list[PeersStore]:
    addresses = [desk.address for desk in desks]
    return [
        PeersStore(desk.store, desk.address, [*addresses[number + 1 :], *addresses[:number]], "stage")
        for number, desk in enumerate(desks)
    ]


def test_small_files_are_everywhere_and_large_ones_twice(desks: list[Desk]) -> None:
    stores = _stores(desks)
    stores[1].write("a/small", [b"sm", b"all"])
    stores[1].write("a/large", [LARGE])
    assert [desk.store.exists("stage/a/small") for desk in desks] == [True] * 3
    assert [desk.store.exists("stage/a/large") for desk in desks] == [False, True, True]


def test_every_peer_reads_what_another_one_has(desks: list[Desk]) -> None:
    stores = _stores(desks)
    stores[1].write("a/large", [LARGE])
    for store in stores:
        assert store.read("a/large") == LARGE
        assert store.read("a/large", 300, 5) == LARGE[300:305]
        assert [(info.path, info.size_bytes) for info in store.list()] == [("a/large", len(LARGE))]
        assert store.folders() == ["a"]
        assert store.stat("a/large").size_bytes == len(LARGE)


def test_a_lost_peer_takes_only_files_without_a_copy(desks: list[Desk]) -> None:
    stores = _stores(desks)
    stores[1].write("large", [LARGE])
    desks[1].__exit__()
    assert stores[0].read("large") == LARGE
    desks[2].__exit__()
    with pytest.raises(NotFoundError, match="no reachable peer has it"):
        stores[0].read("large")
    for desk in desks[1:]:
        desk.__enter__()


def test_half_a_file_is_not_kept(desks: list[Desk]) -> None:
    host, _, port = desks[0].address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"PUT /files/stage/half HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # the peer has read it all, and closes
    assert not desks[0].store.exists("stage/half")


def test_conditional_writes_see_the_files_of_others(desks: list[Desk]) -> None:
    stores = _stores(desks)
    first = stores[0].write_if("COMMIT", b"first", version=None)
    with pytest.raises(ConditionFailedError):
        stores[1].write_if("COMMIT", b"second", version=None)
    assert stores[1].write_if("COMMIT", b"second", version=first.version).version != first.version
    assert stores[2].read("COMMIT") == b"second"


def test_a_peer_that_joins_gets_its_copies(desks: list[Desk]) -> None:
    PeersStore(desks[0].store, desks[0].address, [], "stage").write("large", [LARGE])
    PeersStore(desks[0].store, desks[0].address, [], "stage").write("small", [b"x"])
    for store in _stores(desks):
        store.spread()
    assert [desk.store.exists("stage/large") for desk in desks] == [True, True, False]
    assert [desk.store.exists("stage/small") for desk in desks] == [True] * 3


def test_deleted_files_are_gone_everywhere(desks: list[Desk]) -> None:
    stores = _stores(desks)
    stores[0].write("small", [b"x"])
    stores[2].delete(["small"])
    assert not any(store.exists("small") for store in stores)


def test_the_first_peer_calls_all_that_wait(desks: list[Desk]) -> None:
    book = [desk.address for desk in desks]
    desks[2].status.state = "finished"
    call = next_call(desks[0], book)
    assert call is not None
    assert call.members == tuple(book[:2])
    assert desks[1].calls.get(timeout=240) == call


def test_a_peer_takes_a_generation_once(desks: list[Desk]) -> None:
    call = Call(generation=1, members=(desks[0].address,), rendezvous_port=1)
    desks[0].status.generation = 1
    call_all(call)
    assert desks[0].calls.empty()


def test_strangers_are_those_that_wait_or_work_elsewhere(desks: list[Desk]) -> None:
    book = [desk.address for desk in desks]
    call = Call(generation=1, members=tuple(book[:2]), rendezvous_port=1)
    desks[2].status.state = "finished"
    assert not sees_stranger(desks[0], call, book)
    desks[2].status.state, desks[2].status.leader = WORKING, book[2]
    assert sees_stranger(desks[0], call, book)


def test_the_result_ends_the_wait_of_others(desks: list[Desk]) -> None:
    book = [desk.address for desk in desks]
    tell_labels([1, 2, 3], desks[0], book)
    assert next_call(desks[1], book) is None
    assert desks[1].labels == [1, 2, 3]
    assert look(book)[book[0]].state == "finished"


def test_a_peer_that_cannot_keep_files_knows_it(desks: list[Desk], tmp_path: Path) -> None:
    (tmp_path / "peer1").write_text("a file where its folder should be")
    _stores(desks)[0].write("large", [LARGE])
    assert desks[1].fault is not None
    assert "is a file where a folder is needed" in desks[1].fault
    assert desks[2].store.exists("stage/large")  # the copy went to the next


def test_a_fault_of_the_own_home_is_told(desks: list[Desk], tmp_path: Path) -> None:
    (tmp_path / "peer0").write_text("a file where its folder should be")
    told: list[StoreError] = []
    store = PeersStore(desks[0].store, desks[0].address, [desks[1].address], "stage", on_fault=told.append)
    with pytest.raises(StoreError):
        store.write("small", [b"x"])
    assert len(told) == 1


def test_peers_with_another_task_form_no_crew(desks: list[Desk]) -> None:
    book = [desk.address for desk in desks]
    for desk, seed in zip(desks, [0, 7, 0], strict=True):
        desk.status.task = {"pictures": 3, "album": "a", "seed": seed}
    with pytest.raises(
        UsageError, match=f"others: {book[0]} has seed 0 instead of 7; {book[2]} has seed 0 instead of 7"
    ):
        next_call(desks[1], book)
    call = next_call(desks[0], book)
    assert call is not None
    assert call.members == (book[0], book[2])
    assert not sees_stranger(desks[0], call, book)
    assert not desks[1].take(call)


def test_labels_of_another_task_are_not_taken(desks: list[Desk]) -> None:
    desks[1].status.task = {"seed": 7}
    tell_labels([1, 2, 3], desks[0], [desk.address for desk in desks])
    assert [desk.labels for desk in desks] == [None, None, [1, 2, 3]]


@pytest.mark.parametrize(
    ("seeds", "states", "loser"),
    [
        ([7, 0, 0], [WAITING] * 3, 0),  # fewer
        ([7, 0], [WAITING] * 2, 1),  # later in the book
        ([7, 0], [WAITING, WORKING], 0),  # not at work
    ],
)
def test_the_task_of_most_peers_goes_on(seeds: list[int], states: list[str], loser: int) -> None:
    found = {
        str(n): Status(state, task={"seed": seed}) for n, (seed, state) in enumerate(zip(seeds, states, strict=True))
    }
    for number, seed in enumerate(seeds):
        if number == loser:
            with pytest.raises(UsageError, match="Start all with the same --album and --choices"):
                check_task({"seed": seed}, found)
        else:
            assert check_task({"seed": seed}, found) == [f"{loser} has seed {seeds[loser]} instead of {seed}"]
