"""What is saved can be opened by the URL that it was saved at; every other address is refused before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.storage import StorageWriter
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.errors import NotFoundError, UsageError
from titan_ckpt.location import MAX_STEP, absence, check_writable, normalise, parse_location, run_location
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver, save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.upkeep.copy import copy_checkpoint

STATE = {"w": torch.arange(3.0)}
REFUSED = [
    "runs/c@5", "runs/c@latest", "runs/c@5/", "runs/c@005", "step-00000005", "runs/step-00000005", "runs/step-00000005/",
    "runs/step-00000005/inside", "runs/step-00000005/a-20260101T000000Z-0123abcd", "a-20260101T000000Z-0123abcd", "runs/c\n",
    "runs/c@5\n", "runs/\x1b[31mc", "runs/c\u2028", "runs/\u202ec", "runs/c ", "runs/ c", "runs/a?b", "runs/a?versionId=1",
    "s3:/bucket/c", "/", "//",
    "memory:/c", "memory://c?x=1", "memory://c#x", "memory://c@7", "memory://a/../c", "memory://a//c", "memory://a/./c",
    "file://relative/c", "runs/COMMIT.json", "runs/.metadata", "runs/OWNER.json", "", "  ", "s3://b/step-00000001/x",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("url", REFUSED)
def test_what_no_url_can_open_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Expected a folder|empty URL|did you mean"):
        save(url, STATE, step=5)
    with pytest.raises(UsageError):
        Saver("runs/good", SaveOptions(mirror=url or " "))
    assert list(tmp_path.iterdir()) == []


def test_a_path_at_which_nothing_is_says_so() -> None:
    os.makedirs("runs/tiny")
    there = os.path.join(os.getcwd(), "runs")
    assert absence("runs/tiny") == absence("s3://bucket/none") == ""
    assert absence("runs/tny") == "it does not exist; did you mean 'tiny'?"
    assert absence("runs/other") == "it does not exist; check the path"
    assert absence("runs/a/b") == f"it does not exist; there is no folder {there}/a"
    for look in (open_run, find_content):
        with pytest.raises(NotFoundError, match=f"{there}/tny: it does not exist; did you mean 'tiny'"):
            look("runs/tny")


def test_every_writer_refuses_it() -> None:
    save("good", STATE, step=1)
    source, there = open_checkpoint("good"), sorted(os.listdir())
    with pytest.raises(UsageError, match="inside the folder of a step"):
        copy_checkpoint(source, open_store("runs/step-00000001/x"))
    with pytest.raises(UsageError, match="one step of a run"):
        copy_checkpoint(source, open_store("runs/c@5"))
    with pytest.raises(UsageError, match="one step of a run"):
        run_plan(plan_reshard(source, MeshSpec()), "runs/c@5")
    with pytest.raises(UsageError, match="control character"):
        StorageWriter("runs/\tc", step=1)
    with pytest.raises(UsageError, match="without a step"):
        run_location("runs/c@latest")
    assert sorted(os.listdir()) == there


@pytest.mark.parametrize(
    "url",
    ["runs/c", "c@", "c@x", "a@5b", "c#1", "ü/ß 日", "a/../c", "./c/", "~x", "FILE:///{tmp}/c", "file:///{tmp}/c", "step-5",
     "logs", "step-0000005", "mystep-00000005", "memory://addresses/c", "a:b", "latest", "c%40", "c+d=e&f"],
)  # fmt: skip
def test_what_is_saved_opens_by_its_url(url: str, tmp_path: Path) -> None:
    url = url.replace("/{tmp}", str(tmp_path))
    save(url, STATE, step=3)
    assert torch.equal(open_checkpoint(url).read("w"), STATE["w"])
    assert open_checkpoint(f"{url}@3").step == 3
    assert not [name for name in os.listdir() if name.lower().startswith("file:")]


PARTS = st.sampled_from(["a", "b c", "@", "@5", "@latest", "step-00000001", "/", "//", "..", ".", "?", "#", " ", "\n", "s3:",
                         "file:", "memory://", "COMMIT.json", "x", "~", "%", "\\", "é", "\ud800"])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(PARTS, min_size=1, max_size=5).map("".join))
def test_any_address_is_refused_or_opens(url: str) -> None:
    """Without a store: what the check lets through is parsed back to the same run, at any step."""
    try:
        check_writable(url)
    except UsageError:
        return
    found = parse_location(url)
    assert found.step is None
    assert parse_location(f"{url}@7").url == found.url or url.endswith("/")
    assert parse_location(f"{found.url}@7").step == 7
    assert parse_location(f"{found.url}/step-00000007").url == found.url


BAD_STEPS = [-1, True, False, 1.0, 1.5, float("nan"), "5", None, np.bool_(True), np.float32(3), np.int64(-2), MAX_STEP + 1,
             10**400, torch.tensor(True), torch.tensor(2.0), [3], 1j]  # fmt: skip


@pytest.mark.parametrize("step", BAD_STEPS, ids=str)
def test_a_step_that_no_url_can_name_is_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="must be a whole number from 0 to"):
        save("run", STATE, step=step)
    with Saver("claimed") as saver:
        with pytest.raises(SaveError, match="must be a whole number"):
            saver.save(STATE, step=step)
        saver.save(STATE, step=7).wait()  # the saver goes on
    if step is not None:
        with pytest.raises(UsageError, match="must be a whole number"):
            StorageWriter("run", step=step)
    assert not (tmp_path / "run").exists()
    assert sorted(os.listdir("claimed")) == ["OWNER.json", "step-00000007"]


@pytest.mark.parametrize(
    "step", [0, 99999999, 100000000, MAX_STEP, np.int16(12), np.uint64(13), torch.tensor(14)], ids=str
)
def test_steps_of_any_integer_type_and_size_open(step: Any) -> None:
    report = save("run", STATE, step=step)
    assert type(report.step) is int
    assert open_checkpoint(f"run@{int(step)}").step == int(step)
    assert open_checkpoint("run").step == int(step)


@pytest.mark.parametrize("text", ["run@99999999999999999999", "run@" + "9" * 5000, "run/step-" + "9" * 30])
def test_a_huge_step_in_a_url_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="no step is larger than"):
        parse_location(text)


def test_dots_behind_a_link_mean_what_the_kernel_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "real" / "deep")
    real = os.path.realpath(tmp_path)
    for text, found in (("here/link/../x", "real/x"), ("here/link/y/../x", "here/link/x"), ("here/../x/.", "x")):
        assert normalise(f"{tmp_path}/{text}") == f"{real}/{found}"
        assert parse_location(f"{tmp_path}/{text}@3").url == f"{real}/{found}"
    monkeypatch.chdir(tmp_path / "here")
    assert normalise("link/../x") == f"{real}/real/x"
    assert normalise("../here/./x/") == f"{real}/here/x"


def test_two_steps_that_contradict_are_refused() -> None:
    for step in (1, 2):
        save("good", STATE, step=step)
    assert open_checkpoint("good@1", step=1).step == 1
    with pytest.raises(UsageError, match="names step 1, but step=2 was given as well"):
        open_checkpoint("good@1", step=2)
