"""Secrets stay out of manifests, logs, errors and repr: keys, user info and queries in URLs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import StoreError, TitanError
from titan_ckpt.location import Location, parse_location, redact_text, redact_values
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.store.base import RetryPolicy
from titan_ckpt.store.local import FileStore
from titan_ckpt.store.open import open_store
from titan_ckpt.store.s3_client import S3Options
from tools.faults.store import FaultyStore, StoreFault

SECRETS = ("hunter2", "AKIAEXAMPLE", "tokentoken")
URL = "https://AKIAEXAMPLE:hunter2@host/bucket?token=tokentoken"


def says_nothing(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


def test_nothing_that_holds_a_url_shows_its_secrets(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": torch.zeros(2)}, step=1)
    checkpoint = open_checkpoint(str(tmp_path))
    shown = Checkpoint(store=checkpoint.store, url=URL, step=1, folder="", manifest=checkpoint.manifest)
    for thing in (shown, SaveOptions(mirror=URL), parse_location(URL), Location(url=URL, step=3)):
        assert says_nothing(repr(thing)), type(thing)
        assert says_nothing(str(thing)), type(thing)


def test_s3_options_show_no_keys() -> None:
    options = S3Options(key="AKIAEXAMPLE", secret="hunter2", token="tokentoken", endpoint_url=URL)
    assert says_nothing(repr(options))


def test_no_url_with_secrets_gets_into_a_manifest(tmp_path: Path) -> None:
    config = {"save": {"url": URL, "tiers": [URL, {"mirror": f"see {URL} for more"}]}, "steps": 3}
    with Saver(str(tmp_path)) as saver:
        saver.save({"w": torch.zeros(2)}, step=1, config=config, training={"data": URL}, user={"note": URL})
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or says_nothing(path.read_bytes().decode("latin-1")), path
    stored = open_checkpoint(str(tmp_path)).manifest.config
    assert stored["save"]["url"] == "https://***@host/bucket?***"
    assert stored["steps"] == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no URL? here a@b", "no URL? here a@b"),
        (f"PUT {URL}: refused", "PUT https://***@host/bucket?***: refused"),
        ("('https://u:p@h/x?X-Amz-Signature=1&a=2', 3)", "('https://***@h/x?***', 3)"),
        ("s3://bucket/run@1200", "s3://bucket/run@1200"),
        ("http://u:p@a http://v:q@b", "http://***@a http://***@b"),
    ],
)
def test_secrets_of_urls_are_hidden_in_any_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert redact_values({"a": [text, 1, None]}) == {"a": [expected, 1, None]}


def test_a_librarys_error_reaches_other_ranks_without_secrets(tmp_path: Path) -> None:
    fault = StoreFault(call="write", number=2, error=lambda: StoreError(f"cannot connect to {URL}"))
    store = FaultyStore(FileStore(str(tmp_path)), [fault])
    with Saver(store, SaveOptions(is_exclusive=False)) as saver:
        with pytest.raises(SaveError) as caught:
            saver.save({"w": torch.zeros(2)}, step=1).wait()
        assert "cannot connect" in str(caught.value)
        assert says_nothing(f"{caught.value} {caught.value.__notes__}")


@pytest.mark.parametrize("url", [URL, "s3://AKIAEXAMPLE:hunter2@bucket/run", "ftp://AKIAEXAMPLE:hunter2@127.0.0.1:1/x"])
def test_an_unusable_url_is_refused_without_its_secrets(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRETS[0])
    caplog.set_level(logging.DEBUG, logger="titan_ckpt")
    with pytest.raises(TitanError) as caught:
        open_checkpoint(url, store=open_store(url, retry_policy=RetryPolicy(tries=1)))
    chain: Any = caught.value
    assert says_nothing(f"{chain} {chain!r} {caplog.text}")
