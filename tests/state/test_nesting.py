"""Containers and keys of a state: what is opened, how names are made, what comes back without a template."""

from __future__ import annotations

import collections
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import DamagedError, LoadContractError, NotFoundError, UsageError
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.format.structure import below, decode_structure, merge, names, of_paths, planner_paths, rebuild
from titan_ckpt.loading.load import load
from titan_ckpt.loading.policy import LoadPolicy
from titan_ckpt.parsing.json_values import JsonValue
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.flatten import Names, flatten
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.copy import copy_checkpoint


def _state() -> dict[str, Any]:
    return {
        "model": collections.OrderedDict([("layers.0.w", torch.arange(4.0)), ("b", torch.ones(2, 3))]),
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": torch.tensor(0.1)}],
        "deep": [[torch.ones(1), [{"a": [1, 2]}]], 7],
        "pair": (torch.zeros(2), {"x": torch.ones(1)}),
        "keys": {0: 1, "text": 2, None: 3, 2.5: 4, (1, "a"): 5, False or -1: 6, b"raw": 7},
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "counts": collections.Counter(a=2),
        "lists": collections.defaultdict(list, a=[1]),
    }


def _blank() -> dict[str, Any]:
    state = _state()
    state["model"] = {name: torch.zeros_like(value) for name, value in state["model"].items()}
    state["groups"] = [dict.fromkeys(state["groups"][0]), {"lr": torch.tensor(0.0)}]
    state["deep"] = [[torch.zeros(1), [{"a": None}]], None]
    state["pair"] = (torch.ones(2), {"x": torch.zeros(1)})
    state["keys"] = dict.fromkeys(state["keys"])
    state["counts"], state["lists"] = collections.Counter(a=0), {"a": None}
    return state


def _text(state: Any) -> str:
    """All values, by a text that tells dtypes and bits."""
    if isinstance(state, dict):
        return "{" + ", ".join(f"{key!r}: {_text(value)}" for key, value in state.items()) + "}"
    if isinstance(state, list | tuple):
        return type(state).__name__ + "(" + ", ".join(map(_text, state)) + ")"
    return repr(state.tolist()) + str(state.dtype) if isinstance(state, torch.Tensor) else repr(state)


def test_a_nested_state_fills_a_blank_one(tmp_path: Path) -> None:
    save(str(tmp_path), _state(), step=1)
    state = _blank()
    pair = state["pair"][0]
    load(str(tmp_path), state)
    assert _text(state) == _text(_state())
    assert pair.tolist() == [0, 0], "a tensor in a tuple is filled in place"


def test_everything_is_read_without_a_template(tmp_path: Path) -> None:
    save(str(tmp_path), _state(), step=1)
    checkpoint = open_checkpoint(str(tmp_path))
    found = checkpoint.read_all()
    assert _text(found) == _text(_state())
    for name in ("model", "counts", "lists", "groups", "deep"):
        assert type(found[name]) is type(_state()[name]), name
    assert _text(checkpoint.read_all("groups")) == _text(_state()["groups"])
    assert _text(checkpoint.read_all("deep.0.1")) == _text(_state()["deep"][0][1])
    assert _text(checkpoint.read_all("model.layers.0")) == _text({"w": torch.arange(4.0)})
    assert checkpoint.read_all("groups.0.lr") == 0.5
    with pytest.raises(NotFoundError, match="nothing below 'modell'"):
        checkpoint.read_all("modell")


def test_a_prefix_names_the_place_of_a_state(tmp_path: Path) -> None:
    save(str(tmp_path), {"model": {"w": torch.arange(3)}, "ema": {"w": torch.arange(3) * 2}}, step=1)
    module = {"w": torch.zeros(3, dtype=torch.int64)}
    load(str(tmp_path), module, prefix="ema")
    assert module["w"].tolist() == [0, 2, 4]
    with pytest.raises(LoadContractError, match=r"teacher\.w: missing"):
        load(str(tmp_path), module, prefix="teacher")


def test_a_prefix_of_several_parts_leaves_its_neighbours(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    save(str(tmp_path), {"model": model.state_dict()}, step=1)
    part = torch.nn.Linear(2, 2).state_dict()
    assert load(str(tmp_path), part, prefix="model.0").loaded == ["model.0.weight", "model.0.bias"]
    assert torch.equal(part["weight"], model.state_dict()["0.weight"])
    del part["bias"]
    with pytest.raises(LoadContractError, match=r"model\.0\.bias: in the checkpoint but not in the state") as raised:
        load(str(tmp_path), part, prefix="model.0")
    assert "model.1" not in str(raised.value)


@pytest.mark.parametrize(("saved", "now"), [(0.1, torch.tensor(0.5)), (torch.tensor(0.1), 0.5)])
def test_an_optimizer_gets_the_saved_kind_of_rate(tmp_path: Path, saved: Any, now: Any) -> None:
    def stepped(rate: Any) -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], lr=rate)
        weight.grad = torch.ones(3)
        optimizer.step()
        return optimizer

    first, second = stepped(saved), stepped(now)
    save(str(tmp_path), {"o": first}, step=1)
    load(str(tmp_path), {"o": second})
    assert _text(second.state_dict()) == _text(first.state_dict())
    with pytest.raises(LoadContractError, match=r"o\.param_groups\.0\.lr: is .* in the state and .* in the checkpoint"):
        load(str(tmp_path), {"o": stepped(now).state_dict()}, policy=LoadPolicy(missing="allow", extra="allow"))


def _theirs(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.parent / "plain.pt")
    return torch.load(folder.parent / "plain.pt", weights_only=False)


def test_dcp_reads_from_us_what_it_reads_from_itself(tmp_path: Path) -> None:
    dcp.save(_state(), checkpoint_id=tmp_path / "theirs")
    expected = _theirs(tmp_path / "theirs")
    save(str(tmp_path / "ours"), _state(), step=1)
    dcp.save(_state(), storage_writer=StorageWriter(f"{tmp_path}/writer@1"))
    source = open_checkpoint(f"{tmp_path}/ours")
    run_plan(plan_reshard(source, MeshSpec.parse("dp_replicate=2")), f"{tmp_path}/resharded")
    copy_checkpoint(source, open_store(f"{tmp_path}/copied"))
    for name in ("ours", "writer", "resharded", "copied"):
        found = _theirs(tmp_path / name / "step-00000001")
        assert sorted(found) == sorted(expected), name
        assert {key: _text(value) for key, value in found.items()} == {k: _text(v) for k, v in expected.items()}, name
    state = _blank()
    dcp.load(state, checkpoint_id=tmp_path / "resharded" / "step-00000001")
    del state["keys"]  # DCP puts values under the text of a key
    assert _text(state) == _text({key: value for key, value in _state().items() if key != "keys"})
    ours = open_checkpoint(f"{tmp_path}/resharded").read_all()
    assert _text(ours) == _text(_state())


def test_their_checkpoints_and_ours_load_alike(tmp_path: Path) -> None:
    dcp.save(_state(), checkpoint_id=tmp_path / "theirs")
    state = _blank()
    load(str(tmp_path / "theirs"), state)
    assert _text(state) == _text(_state())
    assert list(open_checkpoint(str(tmp_path / "theirs")).read_all("groups")[0]) == ["lr", "betas", "params"]
    reader = StorageReader(str(tmp_path / "theirs"))
    assert reader.read_metadata().planner_data["groups.1.lr"] == ("groups", 1, "lr")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {1: 2, "1": 3}}, "two entries named 'a.1'"),
        ({"a.b": 1, "a": {"b": 2}}, r"two entries named 'a\.b'"),
        ({"a": {object(): 1}}, "a: a key of type object has no name"),
        ({"a": {torch.ones(1): 1}}, "a: a key of type Tensor has no name"),
        ({"\ud800": 1}, "half of a surrogate pair"),
    ],
)
def test_a_state_without_clear_names_is_refused(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        flatten(state)
    with pytest.raises(Exception, match=message):
        save(str(tmp_path), state, step=1)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(UsageError, match="contains itself"):
        flatten(state)


def test_what_old_releases_took_apart_still_loads() -> None:
    names_of = ["pair.0", "pair.1.x", "list"]
    state = {"pair": (torch.ones(1), {"x": 1}), "list": [{"lr": 1}]}
    assert sorted(flatten(state, stored=Names(values={"list"}, all=names_of)).keys) == sorted(names_of)
    assert sorted(flatten(state).keys) == ["list.0.lr", "pair"]


def test_structures_of_ranks_are_merged() -> None:
    first, second = flatten({"a": {"x": 1}, "l": [{"b": 1}]}), flatten({"a": {"y": 1}, "l": [{"b": 1}, {"b": 2}]})
    merged = merge([first.structure, second.structure, first.structure])
    assert [name for name in names(merged) if name] == ["a.x", "l.0.b", "a.y", "l.1.b"]
    entries = {"a.x": 1, "a.y": 2, "l.0.b": 3, "l.1.b": 4}
    assert rebuild(merged, entries) == {"a": {"x": 1, "y": 2}, "l": [{"b": 3}, {"b": 4}]}
    assert planner_paths(merged)["l.1.b"] == ("l", 1, "b")
    for wrong in ({"a": [{"x": 1}]}, {"a.x": 1}, {"a": 1}):
        with pytest.raises(UsageError, match="two entries for"):
            merge([first.structure, flatten(wrong).structure])


def test_paths_that_contradict_themselves_are_refused() -> None:
    for paths in ({"a": ("a",), "a.b": ("a", "b")}, {"a.0": ("a", 0), "a.b": ("a", "b")}, {"": ()}):
        with pytest.raises(UsageError):
            of_paths(paths)  # type: ignore[arg-type]
    far = of_paths({"a.1": ("a", 10**6)})
    with pytest.raises(DamagedError, match="place 1000000 of a list"):
        rebuild(far, {"a.1000000": 1})
    assert below(far, "b") is None


@pytest.mark.parametrize(
    "state",
    [{"m": {}}, {"l": []}, {"n": {"x": {}, "z": 0}}, {"m": collections.OrderedDict()}, {"step": 0, "m": {}}],
    ids=str,
)
def test_an_empty_container_takes_nothing_in_silence(state: dict[str, Any], tmp_path: Path) -> None:
    whole = {"m": {"w": torch.ones(2)}, "l": [torch.ones(1), 2], "n": {"x": {"y": torch.ones(2)}, "z": 1}, "step": 3}
    save(str(tmp_path / "run"), whole, step=1)
    before = repr(state)
    with pytest.raises(LoadContractError, match="in the checkpoint but not in the state"):
        load(str(tmp_path / "run"), state)
    assert repr(state) == before


@pytest.mark.parametrize("value", [torch.ones(2), 1, {"a": 1}, {"": 2}, [1, 2]], ids=repr)
def test_the_empty_text_is_a_key_like_any_other(value: Any, tmp_path: Path) -> None:
    save(str(tmp_path / "run"), {"": value}, step=1)
    assert repr(open_checkpoint(tmp_path / "run").read_all()) == repr({"": value})


def test_names_that_nesting_makes_endless_are_refused() -> None:
    deep = [["dict"], *([number, "key", "dict"] for number in range(20_000))]
    long = [["dict"], [0, "k" * 100_000, "dict"], *([1, str(number)] for number in range(3000))]
    for rows in (deep, long):
        with pytest.raises(DamagedError, match="names have at most"):
            decode_structure(JsonValue(rows, "manifest.json", "structure"))
    few = deep[:200]
    assert len(decode_structure(JsonValue(few, "manifest.json", "structure"))) == 200


def test_an_index_deeper_than_any_state_has_no_nesting() -> None:
    def index(depth: int) -> bytes:
        name = ".".join(map(str, range(depth)))
        entry = Metadata(
            state_dict_metadata={name: BytesStorageMetadata()},
            planner_data={name: tuple(map(str, range(depth)))},
            storage_data={MetadataIndex(name): _StorageInfo("__0_0.distcp", 0, 8)},
        )
        return pickle.dumps(entry)

    found = [read_dcp_metadata(index(depth), sizes={"__0_0.distcp": 8}, step=1, where="x") for depth in (200, 300)]
    assert [manifest.structure is not None for manifest in found] == [True, False]


def test_each_map_of_a_chain_keeps_its_keys(tmp_path: Path) -> None:
    chain: collections.ChainMap[str, Any] = collections.ChainMap({"a": 1}, {"b": torch.ones(2), "c": {"d": 5}, "a": 1})
    save(str(tmp_path), {"v": chain}, step=1)
    found: collections.ChainMap[str, Any] = collections.ChainMap({"a": 0}, {"b": torch.zeros(2), "c": {"d": 0}, "a": 0})
    load(str(tmp_path), {"v": found})
    assert [sorted(each) for each in found.maps] == [["a"], ["a", "b", "c"]]
    assert (found["a"], found["c"], found["b"].tolist()) == (1, {"d": 5}, [1.0, 1.0])
