"""What no reader could give back is refused when it is saved, on every rank, by name; what is stored twice, when it is read."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, DamagedError, TitanError, UsageError
from titan_ckpt.format import commit as commit_module
from titan_ckpt.format.commit import write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.manifest_json import EncodedManifest, decode_manifest, encode_manifest
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver, save
from titan_ckpt.state.exchange import MAX_LINE, MAX_TEXT, failure_of
from titan_ckpt.store.local import FileStore
from tools.rank_pool import RankPool

STATE: dict[str, Any] = {"w": torch.arange(8.0), "note": 5}
LINEAR = torch.nn.Linear(2, 2)


def _nested(levels: int, *, is_list: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if is_list else {"a": value}
    return value


@pytest.mark.parametrize("part", ["training", "config", "user"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("caf\udce9.txt", "UTF-8 cannot hold"),
        ({"caf\udce9.txt": 1}, "UTF-8 cannot hold"),
        (_nested(64, is_list=True), "nested more than 64 deep"),
        (_nested(64, is_list=False), "nested more than 64 deep"),
        (10**5000, "could not be read back"),
    ],
    ids=["text", "key", "lists", "mappings", "integer"],
)
def test_metadata_that_cannot_be_read_back_is_refused(tmp_path: Path, part: str, value: Any, message: str) -> None:
    parts: dict[str, Any] = {part: {"x": value}}
    with pytest.raises(TitanError, match=message):
        save(str(tmp_path), STATE, step=1, **parts)
    assert not list(tmp_path.glob("step-*/COMMIT.json"))


def test_metadata_at_the_limits_comes_back(tmp_path: Path) -> None:
    user = {"deep": _nested(62, is_list=False), "big": 10**4000, "text": "caf\u00e9 \U0001f600"}
    save(str(tmp_path), STATE, step=1, user=user)
    assert open_checkpoint(str(tmp_path)).manifest.user == user


@pytest.mark.parametrize("state", [{"caf\udce9": torch.ones(2)}, {"model": {"caf\udce9": 1}}])
def test_names_that_cannot_be_read_back_are_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(TitanError, match="half of a surrogate pair"):
        save(str(tmp_path), state, step=1)


@pytest.mark.parametrize(
    "state",
    [None, "s", LINEAR, LINEAR.state_dict, torch.ones(3), LINEAR.state_dict().items(), [("w", torch.ones(2))]],
    ids=["none", "text", "module", "method", "tensor", "items", "list"],
)
def test_a_state_that_is_no_mapping_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(TitanError, match=f"state is of type {type(state).__name__}"):
        save(str(tmp_path), state, step=1)
    save(str(tmp_path), STATE, step=1)
    with pytest.raises(UsageError, match=f"state is of type {type(state).__name__}"):
        load(str(tmp_path), state)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


@pytest.mark.parametrize("make", [lambda: torch.empty(3, device="meta"), _fake], ids=["meta", "fake"])
@pytest.mark.parametrize("is_async", [True, False])
def test_tensors_without_values_are_refused(tmp_path: Path, make: Callable[[], torch.Tensor], is_async: bool) -> None:
    with Saver(str(tmp_path)) as saver:
        with pytest.raises(TitanError, match=r"model\.x: is on the meta device"):
            (saver.save if is_async else saver.save_now)({"model": {"x": make()}}, step=1)
        saver.save(STATE, step=2).wait()
    assert open_checkpoint(str(tmp_path)).step == 2


class Unreadable(torch.Tensor):
    """A tensor whose values raise when they are read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.copy_, torch.Tensor.contiguous):
            raise RuntimeError("no values here")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tensor_that_cannot_be_read_is_named(tmp_path: Path, is_async: bool) -> None:
    unreadable: torch.Tensor = torch.ones(3).as_subclass(Unreadable)
    state = {"model": {"x": unreadable}}
    with Saver(str(tmp_path)) as saver:

        def run() -> object:
            return saver.save(state, step=1).wait() if is_async else saver.save_now(state, step=1)

        with pytest.raises(TitanError, match=r"model\.x: its values cannot be read"):
            run()


@pytest.mark.parametrize(
    "line",
    ["x", "x\n", "password=hunter2 ", "s3://me:hunter2hunter2@bucket ", "password=hunter2\n"],
    ids=["one line", "lines", "secrets", "URLs", "lines of secrets"],
)
def test_a_huge_error_is_cut_before_it_is_sent(line: str) -> None:
    text, started = line * (10_000_000 // len(line)), time.process_time()
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        found = failure_of(3, error).text
    assert len(found) < MAX_TEXT + 2 * MAX_LINE
    assert max(map(len, found.split("\n"))) < MAX_LINE + 100
    assert "RuntimeError: " in found
    assert "hunter2" not in found
    assert time.process_time() - started < 20


def _manifest_with(url: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of step 1, with COMMIT and `.metadata` to match, as a writer with this fault would."""
    checkpoint, store = open_checkpoint(f"{url}@1"), FileStore(url)

    def changed(manifest: Any) -> EncodedManifest:
        content = json.loads(encode_manifest(manifest).manifest)
        change(content)
        return EncodedManifest(manifest=json.dumps(content).encode(), digests=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_module, "_encoded", lambda manifest, _: changed(manifest))
        before = commit_module.found_before(store, 1)
        write_commit(store, checkpoint.manifest, dcp_metadata(checkpoint.manifest), replaces=before)


def test_a_manifest_without_digests_opens(tmp_path: Path) -> None:
    save(str(tmp_path), STATE, step=1)
    _manifest_with(str(tmp_path), lambda content: content.update(digests=None))
    target = {"w": torch.zeros(8)}
    load(str(tmp_path), target)
    assert torch.equal(target["w"], STATE["w"])
    assert open_checkpoint(str(tmp_path)).digests is None
    assert verify(str(tmp_path), read_data=True) == []


def _value_twice(content: dict[str, Any]) -> None:
    content["objects"] *= 2


def _value_named_as_tensor(content: dict[str, Any]) -> None:
    content["objects"][0]["fqn"] = "w"


@pytest.mark.parametrize("change", [_value_twice, _value_named_as_tensor])
def test_two_things_of_one_name_are_damage(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    save(str(tmp_path), STATE, step=1)
    _manifest_with(str(tmp_path), change)
    with pytest.raises(DamagedError, match="is listed twice"):
        open_checkpoint(f"{tmp_path}@1")
    assert "is listed twice" in str(verify(f"{tmp_path}@1"))


@pytest.mark.parametrize("codec", ["raw", "planes-zstd"])
def test_a_chunk_of_another_codec_is_damage(tmp_path: Path, codec: str) -> None:
    save(str(tmp_path), {"w": torch.arange(1000.0)}, step=1, options=SaveOptions(codec=codec))

    def change(content: dict[str, Any]) -> None:
        content["chunks"]["codec"] = [1 - number for number in content["chunks"]["codec"]]
        if codec == "raw":  # the shape of an encoded chunk: its payload ends the blob
            content["chunks"]["length"] = [
                a + b
                for a, b in zip(content["chunks"]["payload_offset"], content["chunks"]["payload_length"], strict=True)
            ]

    _manifest_with(str(tmp_path), change)
    with pytest.raises(DamagedError):
        load(f"{tmp_path}@1", {"w": torch.zeros(1000)})
    assert verify(f"{tmp_path}@1", read_data=True)


def test_what_no_reader_could_open_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(manifest: Any) -> EncodedManifest:
        content = json.loads(encode_manifest(manifest).manifest)
        content["digests"] = base64.b64encode(b"short").decode()
        return EncodedManifest(manifest=json.dumps(content).encode(), digests=None)

    with pytest.raises(CheckpointError):
        decode_manifest(b"{}", where="x")
    monkeypatch.setattr(commit_module, "encode_manifest", broken)
    with pytest.raises(TitanError, match="not committed, since no reader could open it"):
        save(str(tmp_path), STATE, step=1)
    assert not list(tmp_path.glob("step-*/COMMIT.json"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def _bad_states() -> dict[str, tuple[dict[str, Any], str]]:
    """What rank 1 saves, and what all ranks then hear."""
    return {
        "value": ({"w": 5, "note": 5}, "w: rank 0 has a tensor, rank 1 another value"),
        "tensor": ({"w": torch.arange(8.0), "note": torch.ones(1)}, "note: rank 1 has a tensor, rank 0 another value"),
        "other value": ({"w": torch.arange(8.0), "note": 6}, "note: the value on rank 1 differs"),
        "meta": ({"w": torch.empty(8, device="meta"), "note": 5}, "w: is on the meta device"),
    }


def _save_bad(rank: int, url: str, name: str, is_async: bool) -> tuple[str, list[float]]:
    state, raised = (_bad_states()[name][0] if rank == 1 else STATE), ""
    with Saver(url, SaveOptions(timeout_s=60)) as saver:
        try:
            if is_async:
                saver.save(state, step=1).wait()
            else:
                saver.save_now(state, step=1)
        except TitanError as error:
            raised = str(error)
        saver.save(STATE, step=2).wait()
    target = {"w": torch.zeros(8)}
    load(f"{url}@2", target)
    return raised, target["w"].tolist()


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("name", list(_bad_states()))
def test_ranks_that_disagree_about_a_name_all_hear(pool: RankPool, tmp_path: Path, name: str, is_async: bool) -> None:
    for raised, values in pool.run(_save_bad, str(tmp_path / "run"), name, is_async):
        assert _bad_states()[name][1] in raised
        assert values == list(range(8))
    assert not (tmp_path / "run" / "step-00000001" / "COMMIT.json").exists()


def _sub_mesh_state(rank: int, value: float) -> dict[str, Any]:
    """A sharded and a replicated tensor, and a scalar, on a mesh of rank 1 alone."""
    mesh = DeviceMesh("cpu", [1], mesh_dim_names=("dp_replicate",))
    here = rank == 1

    def make(shape: tuple[int, ...], placement: Any) -> DTensor:
        local = torch.full(shape, value) if here else torch.full(shape and (0,), -1.0)
        stride = (1,) * len(shape)
        return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)

    return {"cut": make((3,), Shard(0)), "copied": make((2,), Replicate()), "scalar": make((), Replicate())}


def _save_and_load_sub_mesh(rank: int, url: str) -> list[list[float]]:
    save(url, {**_sub_mesh_state(rank, 7.0), "w": torch.ones(2)}, step=1, options=SaveOptions(timeout_s=60))
    own = _sub_mesh_state(rank, 0.0)
    load(url, own)
    everywhere = {"cut": torch.zeros(3), "copied": torch.zeros(2), "scalar": torch.zeros(())}
    load(url, everywhere)
    found = [tensor.to_local() for tensor in own.values()] if rank == 1 else []
    return [tensor.reshape(-1).tolist() for tensor in [*found, *everywhere.values()]]


@pytest.mark.dist
def test_a_rank_outside_a_tensors_mesh_saves_and_loads(pool: RankPool, tmp_path: Path) -> None:
    values = [[7.0] * 3, [7.0] * 2, [7.0]]
    assert pool.run(_save_and_load_sub_mesh, str(tmp_path / "run")) == [values, values * 2]
