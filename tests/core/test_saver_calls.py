"""Who may call a saver, and when: threads, hooks, forks; and that a staged copy is complete."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.failures import report_failure
from titan_ckpt.errors import StoreError, TitanError, UsageError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.replicas import MAX_BUCKETS, Bucket, bucket_digests, buckets_of, compare_copies
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.saving.staging import device_sums
from titan_ckpt.store.local import FileStore
from tools.faults.store import FaultyStore, StoreFault


def test_two_threads_on_one_saver_commit_their_own_bytes(tmp_path: Path) -> None:
    start, errors = threading.Barrier(2), list[BaseException]()

    def work(saver: Saver, first: int) -> None:
        try:
            start.wait()
            for step in range(first, 20, 2):
                saver.save({"w": torch.full((50_000,), float(step))}, step=step)
        except BaseException as error:  # noqa: BLE001  (asserted below)
            errors.append(error)

    with Saver(str(tmp_path)) as saver:
        threads = [threading.Thread(target=work, args=(saver, first)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert [info.step for info in list_checkpoints(str(tmp_path))] == list(range(20))
    for step in range(20):
        assert set(open_checkpoint(f"{tmp_path}@{step}").read("w").tolist()) == {step}


@pytest.mark.parametrize("name", ["ckpt_stage", "ckpt_upload", "ckpt_commit"])
@pytest.mark.parametrize("call", ["save", "save_now", "wait"])
def test_a_call_from_inside_a_save_is_refused(tmp_path: Path, name: str, call: str) -> None:
    refused: list[BaseException] = []

    @contextmanager
    def phase(entered: str, step: int) -> Iterator[None]:
        if entered == name and step == 2 and not refused:
            try:
                getattr(saver, call)(*([{"w": torch.ones(2)}] if "save" in call else []), **_step(call))
            except UsageError as error:
                refused.append(error)
        yield

    with Saver(str(tmp_path), SaveOptions(phase=phase)) as saver:
        saver.save({"w": torch.ones(2)}, step=1).wait()
        saver.save({"w": torch.ones(2)}, step=2).wait()
    is_free = name == "ckpt_stage" and call in (
        "wait",
        "check",
    )  # nothing is in flight yet, and this is no other thread
    assert len(refused) == (0 if is_free else 1)
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [1, 2]


def _step(call: str) -> dict[str, Any]:
    return {"step": 9} if "save" in call else {}


@pytest.mark.parametrize("name", ["ckpt_stage", "ckpt_upload", "ckpt_commit"])
@pytest.mark.parametrize("when", ["enter", "leave"])
def test_a_hook_that_fails_spoils_no_later_save(tmp_path: Path, name: str, when: str) -> None:
    @contextmanager
    def phase(entered: str, step: int) -> Iterator[None]:
        if (entered, when, step) == (name, "enter", 2):
            raise RuntimeError("hook")
        yield
        if (entered, when, step) == (name, "leave", 2):
            raise RuntimeError("hook")

    with Saver(str(tmp_path), SaveOptions(phase=phase)) as saver:
        saver.save({"w": torch.ones(2)}, step=1).wait()
        is_late = (name, when) == ("ckpt_commit", "leave")
        if is_late:  # the step is committed by then
            saver.save({"w": torch.ones(2)}, step=2).wait()
        else:
            with pytest.raises((SaveError, RuntimeError), match="hook"):
                saver.save({"w": torch.ones(2)}, step=2).wait()
        saver.save({"w": torch.ones(2)}, step=3).wait()
    assert [i.step for i in list_checkpoints(str(tmp_path)) if i.state == "committed"] == [1, *([2] * is_late), 3]


def test_a_forked_child_cannot_use_its_parents_saver(tmp_path: Path) -> None:
    with Saver(str(tmp_path)) as saver:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                saver.save({"w": torch.ones(2)}, step=1)
            except UsageError as error:
                os.write(writer, str(error).encode())
            finally:
                saver.close()
                os._exit(0)
        os.waitpid(child, 0)
        assert b"forked" in os.read(reader, 1000)
        saver.save({"w": torch.ones(2)}, step=2).wait()
    assert open_checkpoint(str(tmp_path)).step == 2


def test_a_closed_saver_says_so(tmp_path: Path) -> None:
    with Saver(str(tmp_path)) as saver:
        pass
    with pytest.raises(UsageError, match="closed"):
        saver.save({"w": torch.ones(2)}, step=1)


def test_nothing_that_changes_after_save_returns_is_stored(tmp_path: Path) -> None:
    gate = threading.Event()

    @contextmanager
    def phase(name: str, _step: int) -> Iterator[None]:
        if name == "ckpt_upload":
            assert gate.wait(240)
        yield

    base = torch.arange(12.0)
    complex_view = torch.tensor([1 + 2j, 3 - 4j])
    state: dict[str, Any] = {
        "whole": base,
        "strided": base.view(3, 4).t(),
        "expanded": torch.tensor([5.0]).expand(4),
        "conjugated": complex_view.conj(),
        "negative": complex_view.conj().imag,
        "list": [1, 2],
        "bytes": bytearray(b"abc"),
    }
    expected = {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}
    training: dict[str, Any] = {"loss": {"mean": 1.0}}
    with Saver(str(tmp_path), SaveOptions(phase=phase)) as saver:
        handle = saver.save(state, step=1, training=training)
        base.zero_()
        complex_view.zero_()
        state["list"].append(3)
        state["bytes"][0] = 0
        training["loss"]["mean"] = 9.0
        gate.set()
        handle.wait()
    checkpoint = open_checkpoint(str(tmp_path))
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    assert checkpoint.manifest.training == {"loss": {"mean": 1.0}}
    found: dict[str, Any] = {"list": None, "bytes": None}
    load(checkpoint, found, policy=LoadPolicy(extra="allow"))
    assert found == {"list": [1, 2], "bytes": bytearray(b"abc")}


def test_lazily_conjugated_tensors_are_saved_as_they_show(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    with Saver(str(tmp_path)) as saver:
        saver.save_now({"conjugated": value.conj(), "imag": value.conj().imag}, step=1)
    assert open_checkpoint(str(tmp_path)).read("conjugated").tolist() == [1 - 2j, 3 + 4j]
    assert open_checkpoint(str(tmp_path)).read("imag").tolist() == [-2.0, 4.0]


def test_two_savers_on_one_run_the_later_owns_it(tmp_path: Path) -> None:
    with Saver(str(tmp_path)) as first:
        first.save({"w": torch.ones(2)}, step=1).wait()
        with Saver(str(tmp_path)) as second:
            second.save({"w": torch.ones(2)}, step=2).wait()
            with pytest.raises(SaveError, match="nothing was committed"):
                first.save({"w": torch.zeros(2)}, step=3).wait()
    assert [i.step for i in list_checkpoints(str(tmp_path)) if i.state == "committed"] == [1, 2]


def test_copies_are_compared_in_few_digests() -> None:
    boxes = [((f"w{n}", ((0,), (2,))), [(0, n), (1, n), (2, n + 5)]) for n in range(1000)]
    buckets = buckets_of([*boxes, (("pair", ((0,), (1,))), [(1, 7000), (2, 7001)])])
    assert len(buckets) <= MAX_BUCKETS + 1
    held = [[bucket.items[rank] for bucket in buckets if rank in bucket.items] for rank in range(3)]
    values = {0: lambda n: f"{n}", 1: lambda n: f"{n}", 2: lambda n: f"{n - 5}" if n < 7000 else "7000"}

    def digests(rank: int, bad: int = -1) -> list[bytes]:
        return bucket_digests(held[rank], lambda n: b"bad" if n == bad else values[rank](n).encode())

    compare_copies(buckets, [digests(rank) for rank in range(3)], 1)
    with pytest.raises(TitanError, match=r"w43\d?.*rank 2 differs from the one on rank 0"):
        compare_copies(buckets, [digests(0), digests(1), digests(2, bad=440)], 1)
    with pytest.raises(TitanError, match="pair: the copy on rank 2 differs from the one on rank 1"):
        compare_copies(buckets, [digests(0), digests(1), digests(2, bad=7001)], 1)
    assert buckets_of([]) == list[Bucket]()


@given(st.integers(0, 3 * 4096), st.integers(0, 2**31), st.sampled_from(["int8", "float16", "float32", "complex128"]))
def test_the_sums_of_a_device_see_every_changed_element(numel: int, seed: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-128, 127, (numel * 16,), generator=generator, dtype=torch.int8)
    tensor = bits.view(getattr(torch, dtype))
    other = tensor.clone()
    assert torch.equal(device_sums(tensor), device_sums(other))
    if tensor.numel() > 1:
        flat = other.view(torch.int8)
        at = int(torch.randint(len(flat), (1,), generator=generator))
        flat[at] ^= 1
        assert not torch.equal(device_sums(tensor), device_sums(other))
        swapped = tensor.clone()
        swapped[[0, -1]] = swapped[[-1, 0]]
        is_same = tensor.view(torch.int8).equal(swapped.view(torch.int8))
        assert torch.equal(device_sums(tensor), device_sums(swapped)) == is_same


@pytest.mark.parametrize(
    ("error", "code", "first"),
    [
        (StoreError("no room"), 3, "titan-ckpt: error: nothing was"),
        (RuntimeError("a bug"), 70, "titan-ckpt: internal error: SaveError"),
    ],
)
def test_a_failed_save_is_one_line(
    tmp_path: Path, error: Exception, code: int, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The traceback of the rank is a note, which Python shows below an uncaught error, and a command does not."""
    store = FaultyStore(FileStore(str(tmp_path)), [StoreFault(call="write", number=2, error=lambda: error)])
    with Saver(store, SaveOptions(is_exclusive=False)) as saver, pytest.raises(SaveError) as caught:
        saver.save({"w": torch.zeros(2)}, step=1).wait()
    reason = f"failed on rank 0: {type(error).__name__}: {error}"
    assert str(caught.value) == f"nothing was committed: the save of step 1 {reason}"
    assert "Traceback (most recent call last)" in caught.value.__notes__[0]
    assert report_failure(caught.value, [], show_traceback=False) == code
    shown = capsys.readouterr().err
    assert shown.startswith(first)
    assert "Traceback" not in shown
    assert report_failure(caught.value, [], show_traceback=True) == code
    assert "Traceback" in capsys.readouterr().err
