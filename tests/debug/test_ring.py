"""The record ring in C and Python: same calls give same records; no caller's object is leaked or over-released."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RAISED, RECORD_DTYPE
from titan_ckpt.debug.read.black_boxes import BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.debug.record import ring
from titan_ckpt.debug.record.hooks import BoxWriter, Hooks
from titan_ckpt.debug.record.ring import AnyRing

pytestmark = pytest.mark.repeats

KINDS = ("C", "Python") if ring.compiled is not None else ("Python",)


def test_the_ring_is_compiled_where_a_compiler_is() -> None:
    compiler, headers = shutil.which("cc"), Path(sysconfig.get_paths()["include"], "Python.h").exists()
    could_be = compiler is not None and headers
    assert ring.compiled is not None or not could_be, "install again: the extension is built with the package"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(ring, "compiled", None)
    return str(request.param)


@pytest.fixture
def box(kind: str, tmp_path: Path) -> Iterator[BoxWriter]:  # noqa: ARG001
    """The box written by hooks on a one-rank group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    box = BoxWriter(tmp_path / "rank_00000.box", rank=0, world_size=1, capacity=64)
    hooks = Hooks(box)
    hooks.install()
    yield box
    hooks.remove()
    dist.destroy_process_group()


def ring_of(kind: str, box: BoxWriter, names: Any) -> AnyRing:
    made = ring.new_ring(box.map, box.capacity, names, {}, {})
    assert (type(made) is ring.Ring) == (kind == "Python")
    return made


def records(box: BoxWriter) -> Any:
    """The ring's slots in memory order."""
    import numpy as np

    return np.frombuffer(bytes(box.map), RECORD_DTYPE, box.capacity, HEADER_BYTES)


def lines(box: BoxWriter) -> list[tuple[str, int]]:
    """Function and line of each operation's call site, oldest first."""
    box.beat()
    parsed = BoxReader(interner := Interner()).parse(bytes(box.map), "box")
    stacks = [interner.frames.values[position] for position in parsed.operations["frames"]]
    return [(stack[0].function, stack[0].line) for stack in stacks]


def test_ends_of_works_that_are_waited_for_in_any_order(box: BoxWriter) -> None:
    works = [dist.all_reduce(torch.ones(n + 1), async_op=True) for n in range(5)]
    for n in (2, 0, 4):
        works[n].wait()
    found = records(box)
    assert found["elements"][:5].tolist() == [1, 2, 3, 4, 5]
    assert [bool(ended) for ended in found["ended"][:5]] == [True, False, True, False, True]
    assert (found["ended"][:5:2] >= found["created"][:5:2]).all()
    works[1].wait()
    works[3].wait()
    assert records(box)["ended"][:5].all()


def test_a_full_ring_begins_again(box: BoxWriter) -> None:
    for _ in range(150):
        dist.all_reduce(torch.ones(2))
    found = records(box)
    assert sorted(found["number"].tolist()) == list(range(87, 151))
    assert found["number"][149 % 64] == 150
    assert found["seq"][149 % 64] == 150


def made(number: int) -> Any:
    """A function in its own file that calls all_reduce on line `2 + number % 50`."""
    space: dict[str, Any] = {"dist": dist, "tensor": torch.ones(1)}
    source = f"def f{number}():\n" + "\n" * (number % 50) + "    dist.all_reduce(tensor)\n"
    exec(compile(source, f"/made/{number}.py", "exec"), space)
    return space[f"f{number}"]


def test_every_function_that_calls_is_a_site_of_its_own(box: BoxWriter) -> None:
    for number in range(330):  # more than the initial size of the site table
        function = made(number)
        for _ in range(2):
            function()
    assert lines(box)[-64:] == [(f"f{number}", 2 + number % 50) for number in range(298, 330) for _ in range(2)]
    assert len(set(records(box)["site"].tolist())) == 32


def test_new_code_at_a_reused_address_gets_its_own_site(box: BoxWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_ckpt.debug.record.hooks.MAX_CODES", 40)  # the table is cleared every few calls
    for number in range(330):
        made(number)()  # the next code object may reuse this one's address
    assert lines(box)[-64:] == [(f"f{number}", 2 + number % 50) for number in range(266, 330)]


def test_threads_write_records_of_their_own(box: BoxWriter) -> None:
    def issue(count: int) -> None:
        for _ in range(500):
            dist.all_reduce(torch.ones(count))

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=issue, args=(count,)) for count in (1, 2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    found = records(box)
    assert sorted(found["number"].tolist()) == list(range(2000 - 63, 2001))
    assert set(found["elements"].tolist()) <= {1, 2, 3, 4}
    assert found["ended"].all()


def test_what_raises_is_raised_and_marked(box: BoxWriter) -> None:
    with pytest.raises(RuntimeError, match=r"[Rr]oot rank"):  # torch's check raises before any work exists
        dist.broadcast(torch.ones(1), group_src=7)
    assert records(box)["ended"][0] == 0
    work = dist.all_reduce(torch.ones(1, dtype=torch.int16), async_op=True)  # gloo cannot sum this dtype
    with pytest.raises(RuntimeError, match="scalar type"):
        work.wait()
    assert (records(box)["outcome"][1], bool(records(box)["ended"][1])) == (RAISED, True)


def test_nothing_of_the_callers_is_kept(box: BoxWriter) -> None:
    group, tensor = dist.group.WORLD, torch.ones(3)
    arguments = [tensor]
    kept = group, tensor, arguments, tensor.dtype, test_nothing_of_the_callers_is_kept.__code__

    def use() -> None:
        for _ in range(3000):
            assert group is not None
            group.allreduce(arguments).wait()
            dist.all_reduce(tensor, async_op=True)  # never waited for
            with pytest.raises(TypeError):
                group.allreduce(tensor, 1, 2, 3)  # type: ignore[call-overload]

    def counted() -> list[int]:
        return [sys.getrefcount(thing) for thing in kept]

    def settled() -> list[int]:
        """Reference counts once stable, after gloo's threads have released the last tensors."""
        deadline, last = time.monotonic() + 60, counted()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, before = counted(), last
            if last == before:
                break
        return last

    use()
    before = settled()
    use()
    assert settled() == before
    assert records(box)["number"].max() == 18000  # calls that raised are recorded too


class Refusing:
    """A name table that refuses every new name."""

    def refuse(self, *_: Any) -> int:
        raise OSError("no more names")

    add_group = add_dtype = add_code = add_site = refuse


def test_an_error_of_the_names_comes_through(kind: str, tmp_path: Path) -> None:
    box = BoxWriter(tmp_path / "box", rank=0, world_size=1, capacity=4)
    made = ring_of(kind, box, Refusing())
    for tensors in (torch.ones(2), [torch.ones(2)], None):
        with pytest.raises(OSError, match="no more names"):
            made.record(1, 0, 0, tensors)
    assert made.count == 0
    assert not records(box)["number"].any()


def test_a_closed_ring_lets_calls_through_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        box = BoxWriter(tmp_path / "box", rank=0, world_size=1, capacity=4)
        hooks = Hooks(box)
        hooks.install()
        late = dist.ProcessGroup.allreduce  # a thread may still hold the hooked method
        dist.all_reduce(torch.ones(1))
        hooks.remove()
        assert box.count == 1
        tensor = torch.ones(2)
        late(dist.group.WORLD, [tensor]).wait()  # type: ignore[arg-type]
        assert tensor.tolist() == [1.0, 1.0]
        if kind == "C":
            assert records(box)["number"].tolist() == [1, 0, 0, 0]
            box.map.close()  # raises if the ring still holds the buffer
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(ring.compiled is None, reason="arguments are the C ring's to check")
def test_a_ring_that_does_not_fit_its_map_is_refused(tmp_path: Path) -> None:
    box = BoxWriter(tmp_path / "box", rank=0, world_size=1, capacity=4)
    assert ring.compiled is not None
    for header, capacity in ((HEADER_BYTES, 1 << 40), (-1, 4), (HEADER_BYTES, 0), (1 << 62, 4)):
        with pytest.raises(ValueError, match="do not fit"):
            ring.compiled.Ring(box.map, header, capacity, Refusing(), {})
    with pytest.raises(BufferError):
        ring.compiled.Ring(b"read only", 0, 1, Refusing(), {})


def test_it_binds_like_a_method(box: BoxWriter) -> None:
    group = dist.group.WORLD
    assert group is not None
    bound = group.allreduce
    assert isinstance(bound, types.MethodType)
    bound([torch.ones(4)]).wait()
    group.allreduce(tensors=[torch.ones(5)], opts=dist.AllreduceOptions()).wait()  # passed by keyword: size unknown
    assert records(box)["elements"][:2].tolist() == [4, -1]
