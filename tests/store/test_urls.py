"""What the public functions take for a URL: text or path objects; everything else is refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import titan_ckpt as tc
import titan_ckpt.debug as debug
from titan_ckpt.console.store_arguments import check_urls
from titan_ckpt.converters import export_hf, import_hf, open_hf, open_hf_checkpoint
from titan_ckpt.converters.torch_file import export_torch, import_torch
from titan_ckpt.errors import UsageError
from titan_ckpt.location import redact, redact_text
from titan_ckpt.saving.saver import SaveError

WRONG = [
    None,
    3,
    True,
    b"/tmp/x",
    ["/tmp/x"],
    io.BytesIO(),
    {"url": "x"},
    "",
    " ",
    "a\0b",
    Path,
    Path("s3://bucket/run"),
]
STATE = {"w": torch.arange(4.0)}


def run_at(folder: Path) -> Path:
    tc.save(folder, STATE, step=1)
    return folder


def test_every_function_takes_a_path_object(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    at_step = tmp_path / "run@1"
    assert [info.step for info in tc.list_checkpoints(run)] == [1]
    assert tc.open_checkpoint(at_step).step == tc.open_checkpoint(run, step=1).step == 1
    assert tc.verify(run) == []
    assert tc.diff(run, at_step) == []
    target = {"w": torch.zeros(4)}
    tc.load(at_step, target)
    assert target["w"].tolist() == [0, 1, 2, 3]
    with tc.Saver(tmp_path / "fast", tc.SaveOptions(mirror=tmp_path / "safe")) as saver:
        saver.save(STATE, step=2)
    assert tc.open_checkpoint(tmp_path / "safe").step == 2
    tc.run_plan(tc.plan_reshard(run, "dp_shard=2"), tmp_path / "resharded")
    assert tc.diff(run, tmp_path / "resharded")[0].is_layout
    export_torch(run, tmp_path / "state.pt")
    assert import_torch(tmp_path / "state.pt", tmp_path / "again").num_tensors == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dcp_takes_a_path_object_with_a_step(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "run@7", storage_writer=tc.StorageWriter())
    dcp.save(STATE, storage_writer=tc.StorageWriter(tmp_path / "run", step=8))
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=tc.StorageReader(tmp_path / "run@7"))
    assert target["w"].tolist() == [0, 1, 2, 3]
    assert [info.step for info in tc.list_checkpoints(tmp_path / "run")] == [7, 8]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_no_url_is_refused_by_every_function(tmp_path: Path, wrong: Any) -> None:
    run = run_at(tmp_path / "run")
    plan = tc.plan_reshard(run, "1")
    calls: list[Callable[[], object]] = [
        lambda: tc.save(wrong, STATE, step=1),
        lambda: tc.Saver(wrong),
        lambda: tc.open_store(wrong),
        lambda: tc.open_checkpoint(wrong),
        lambda: tc.list_checkpoints(wrong),
        lambda: tc.load(wrong, {"w": torch.zeros(4)}),
        lambda: tc.verify(wrong),
        lambda: tc.diff(run, wrong),
        lambda: tc.plan_reshard(wrong, "1"),
        lambda: tc.run_plan(plan, wrong),
        lambda: tc.StorageWriter(wrong, step=1).reset(),
        lambda: tc.StorageReader(wrong).checkpoint,
        lambda: open_hf(wrong),
        lambda: open_hf_checkpoint(wrong),
        lambda: import_hf(wrong, run),
        lambda: export_hf(wrong, run),
        lambda: import_torch(wrong, run),
        lambda: export_torch(run, wrong),
        lambda: debug.open_run(wrong),
    ]
    for call in calls:
        with pytest.raises(
            UsageError, match=r"give (a folder or a URL|an open Checkpoint|URLs as text)|NUL character|empty URL"
        ):
            call()


def test_a_closed_saver_refuses_every_call(tmp_path: Path) -> None:
    saver = tc.Saver(tmp_path)
    saver.save(STATE, step=1)
    saver.close()
    saver.close()
    assert saver.metrics().last_committed_step == 1
    for call in (
        lambda: saver.save(STATE, step=2),
        lambda: saver.save_now(STATE, step=2),
        saver.check,
        saver.wait,
        saver.__enter__,
    ):
        with pytest.raises(UsageError, match="the saver is closed"):
            call()
    assert [info.step for info in tc.list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize(
    ("assets", "problem"),
    [
        ([b"x"], "assets is"),
        ({3: b""}, "a name in assets"),
        ({"a": "text"}, r"assets\['a'\]"),
        ({"a": 3}, r"assets\['a'\]"),
    ],
)
def test_assets_that_are_no_files_are_refused(tmp_path: Path, assets: Any, problem: str) -> None:
    with tc.Saver(tmp_path / "run") as saver:
        with pytest.raises(SaveError, match=problem):
            saver.save(STATE, step=1, assets=assets)
        saver.save(STATE, step=1, assets={"a": b"text"}).wait(timeout_s=60)
    assert tc.open_checkpoint(tmp_path / "run").asset("a") == b"text"


def test_arguments_of_a_wrong_type_are_named(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run")
    checkpoint: Any = tc.open_checkpoint(run)
    wrong: Any = 3
    calls: list[tuple[str, Callable[[], object]]] = [
        ("box", lambda: checkpoint.read("w", box=wrong)),
        ("mesh", lambda: tc.MeshSpec.parse(wrong)),
        ("mesh", lambda: tc.plan_reshard(run, wrong)),
        ("plan", lambda: tc.run_plan(wrong, tmp_path / "new")),
        ("read_data", lambda: tc.verify(run, read_data=wrong)),
        ("on_bytes", lambda: tc.verify(run, on_bytes=wrong)),
        ("step", lambda: tc.open_checkpoint(run, step=1.5)),  # type: ignore[arg-type]
        ("store", lambda: tc.open_checkpoint(run, store=wrong)),
        ("options", lambda: tc.save(run, STATE, step=2, options={})),  # type: ignore[arg-type]
        ("retry_policy", lambda: tc.open_store(run, retry_policy=wrong)),
    ]
    for name, call in calls:
        with pytest.raises(UsageError, match=name):
            call()


@pytest.mark.parametrize("url", ["::memory://a", "://a", "::a"])
def test_a_url_without_its_scheme_is_no_folder(url: str) -> None:
    with pytest.raises(UsageError, match="names no scheme"):
        tc.save(url, STATE, step=1)


def test_a_question_mark_in_a_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"its name has a `\?`"):
        tc.save(tmp_path / "a?b", STATE, step=1)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/run", "simplecache::ftp://127.0.0.1/run"])
def test_ftp_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(UsageError, match=r"one connection.*sftp://"):
        tc.list_checkpoints(url)


@pytest.mark.parametrize("name", ["zip", "tar"])
def test_an_archive_needs_the_url_of_its_file(name: str) -> None:
    with pytest.raises(UsageError, match=f"names no archive; write {name}://FOLDER_IN_IT::"):
        tc.list_checkpoints(f"{name}://run.{name}")


def test_what_a_store_holds_is_opened_and_loaded_from_it(tmp_path: Path) -> None:
    store = tc.open_store(f"memory://{tmp_path.name}/run")
    for step in (1, 2):
        tc.save(store, {"w": STATE["w"] + step}, step=step)
    assert (tc.open_checkpoint(store).step, tc.open_checkpoint(store, step=1).step) == (2, 1)
    found = {"w": torch.zeros(4)}
    tc.load(store, found)
    assert torch.equal(found["w"], STATE["w"] + 2)


def test_a_container_before_an_account_is_no_password() -> None:
    url = "abfs://container@account.dfs.core.windows.net/run"
    check_urls([url, f"{url}@5", f"save.url={url}"])
    assert redact(url) == url
    assert redact_text(f"{url}@5: gone, s3://a:b@c/d") == f"{url}@5: gone, s3://***@c/d"
    for secret in (url.replace("container", "user:pw"), url.replace("abfs", "https"), f"{url}?sig=abc"):
        with pytest.raises(UsageError, match="secrets on a command line"):
            check_urls([secret])
