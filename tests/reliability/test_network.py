"""Broken connections to a real S3 server: short outages are retried, long ones lose only the save in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.demo.s3_server import Server
from titan_ckpt.errors import TransientStoreError
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.open import open_store
from tools.faults.proxy import FaultyProxy

pytestmark = pytest.mark.s3
QUICK = RetryPolicy(tries=3, first_wait_s=0.01, longest_wait_s=0.05, deadline_s=20)


@pytest.fixture
def proxy(s3_server: Server, s3_environment: dict[str, str]) -> Iterator[FaultyProxy]:
    assert s3_environment
    host, _, port = s3_server.endpoint.removeprefix("http://").partition(":")
    with FaultyProxy(host, int(port)) as flaky:
        yield flaky


def store_through(proxy: FaultyProxy, url: str) -> Any:
    return open_store(url, retry_policy=QUICK, endpoint_url=f"http://127.0.0.1:{proxy.port}")


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((6 << 20,), float(step)), "small": torch.full((10,), float(step))}


def newest(url: str) -> tuple[int, float]:
    state, checkpoint = state_of(0), open_checkpoint(url)
    load(checkpoint, state)
    assert verify(url, read_data=True) == []
    return checkpoint.step, float(state["w"][-1])


@pytest.mark.parametrize("num_bytes", [1, 3000, 8 << 20])
def test_a_connection_that_is_reset_now_and_then_costs_a_retry(proxy: FaultyProxy, s3_url: str, num_bytes: int) -> None:
    with Saver(store_through(proxy, s3_url), SaveOptions(timeout_s=60)) as saver:
        saver.save(state_of(1), step=1).wait()
        proxy.cut_after(num_bytes, times=2)
        saver.save(state_of(2), step=2).wait()
    assert proxy.num_cut == 2
    assert newest(s3_url) == (2, 2.0)


@pytest.mark.parametrize("num_bytes", [1, 3000, 8 << 20])
def test_a_network_outage_loses_only_the_save_under_way(proxy: FaultyProxy, s3_url: str, num_bytes: int) -> None:
    with Saver(store_through(proxy, s3_url), SaveOptions(timeout_s=60)) as saver:
        saver.save(state_of(1), step=1).wait()
        proxy.cut_after(num_bytes)
        with pytest.raises((TransientStoreError, SaveError), match="given up after 3 tries"):
            saver.save(state_of(2), step=2).wait()
        proxy.heal()
        assert newest(s3_url) == (1, 1.0)
        saver.save(state_of(3), step=3).wait()
    assert newest(s3_url) == (3, 3.0)
