"""A save, an open and a load make the S3 requests that docs/checkpoints.md lists."""

from __future__ import annotations

import http.client
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver

PART_BYTES = 16 << 20
DEAR, CHEAP = ("PUT", "POST", "LIST"), ("GET", "HEAD")

pytestmark = pytest.mark.s3


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A context that counts this process's requests as (PUT, POST and LIST, GET and HEAD)."""
    seen: Counter[str] = Counter()
    real = http.client.HTTPConnection.putrequest

    def putrequest(self: http.client.HTTPConnection, method: str, url: str, *args: Any, **kwargs: Any) -> None:
        seen["LIST" if "list-type" in url else method] += 1
        real(self, method, url, *args, **kwargs)

    monkeypatch.setattr(http.client.HTTPConnection, "putrequest", putrequest)

    @contextmanager
    def count() -> Iterator[list[int]]:
        before, found = Counter(seen), [0, 0]
        yield found
        found[:] = [sum(seen[m] - before[m] for m in methods) for methods in (DEAR, CHEAP)]

    return count


def _state(size_bytes: int, num_tensors: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.randn(size_bytes // 4 // num_tensors) for n in range(num_tensors)}


def test_a_save_makes_the_documented_requests(s3_url: str, counted: Callable[[], Any]) -> None:
    with counted() as opening, Saver(s3_url) as saver:
        pass
    assert opening == [1, 0]
    with Saver(s3_url) as saver:
        with counted() as large:
            report = saver.save_now(_state(40 << 20, 4), step=1)
        with counted() as small:
            saver.save_now(_state(1 << 20, 4), step=2)
    assert large == [-(-report.written_bytes // PART_BYTES) + 2 + 9 + 1, 11]  # the first save lists the run
    assert small == [1 + 9, 11]


def test_an_incremental_save_without_changes_writes_no_data(s3_url: str, counted: Callable[[], Any]) -> None:
    state = _state(1 << 20, 4)
    with Saver(s3_url, SaveOptions(incremental=True)) as saver:
        saver.save_now(state, step=1)
        with counted() as again:
            saver.save_now(state, step=2)
    assert again == [9 + 2, 11]


def test_open_and_load_make_the_documented_requests(s3_url: str, counted: Callable[[], Any]) -> None:
    state = _state(40 << 20, 4)
    with Saver(s3_url) as saver:
        saver.save_now(state, step=1)
    with counted() as opening:
        checkpoint = open_checkpoint(s3_url)
    assert opening == [2, 4]
    with counted() as loading:
        load(checkpoint, state)
    assert loading == [0, len(state)]
