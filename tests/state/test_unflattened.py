"""Folders that DCP wrote with `flatten_state_dict=False`: each mapping is one value, in which DCP has made every key text."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt import cp, load, open_checkpoint, reshard
from titan_ckpt.converters.torch_file import export_torch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def written(folder: Path, state: dict[str, Any], *, rewrites_keys: bool = True) -> str:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=rewrites_keys)
    dcp.save(state, checkpoint_id=folder / "step-10", planner=planner, no_dist=True)
    return str(folder / "step-10")


def by_plain_dcp(url: str, name: str) -> Any:
    target = {name: None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(target, checkpoint_id=url, planner=planner, no_dist=True)
    return target[name]


def stepped(seed: int, steps: int = 1, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    for _ in range(steps):
        module(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return module, optimizer


def assert_same_moments(found: torch.optim.Optimizer, saved: torch.optim.Optimizer) -> None:
    pairs = zip(found.param_groups[0]["params"], saved.param_groups[0]["params"], strict=True)
    for here, there in pairs:
        assert found.state[here].keys() == saved.state[there].keys()
        assert all(torch.equal(found.state[here][key], value) for key, value in saved.state[there].items())


@pytest.mark.parametrize("steps", [0, 1])
def test_an_optimizer_finds_its_moments(tmp_path: Path, steps: int) -> None:
    """Also a new one, which has no numbers of parameters yet that the text could be compared with."""
    _, saved = stepped(1)
    url = written(tmp_path, {"optim": saved.state_dict()})
    assert list(by_plain_dcp(url, "optim")["state"]) == ["0", "1"], "what DCP has made of the numbers"
    _, target = stepped(2, steps)
    load(url, {"optim": target})
    assert len(target.state) == 2
    assert_same_moments(target, saved)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_dict_of_an_optimizer_gets_numbers(tmp_path: Path, steps: int) -> None:
    _, saved = stepped(1)
    url = written(tmp_path, {"train": {"optim": saved.state_dict()}})
    _, target = stepped(2, steps)
    state = {"train": {"optim": target.state_dict()}}
    load(url, state)
    target.load_state_dict(state["train"]["optim"])
    assert_same_moments(target, saved)


def test_an_optimizer_without_moments_is_loaded(tmp_path: Path) -> None:
    """DCP leaves out the empty mapping `state`, without which no optimizer loads."""
    _, saved = stepped(1, steps=0, lr=0.25)
    url = written(tmp_path, {"optim": saved.state_dict()})
    assert "state" not in by_plain_dcp(url, "optim")
    _, target = stepped(2, steps=0)
    load(url, {"optim": target})
    assert target.param_groups[0]["lr"] == 0.25


def test_keys_and_containers_are_those_of_the_state(tmp_path: Path) -> None:
    ordered = OrderedDict([(2, torch.ones(2)), (1, torch.zeros(2))])
    saved = {0: 1, "x": {2: 3, None: 1}, "l": [{5: 6}, 7], "t": ({7: 8},), "o": ordered, "0.5": 1}
    url = written(tmp_path, {"cfg": saved})
    place = torch.full((2,), 7.0)
    state = {"cfg": {0: 0, "x": {2: 0, None: 0}, "l": [{5: 0}], "t": (), "o": OrderedDict([(2, place)]), "0.5": 0}}
    load(url, state)
    found: dict[Any, Any] = dict(state["cfg"])
    assert [list(found), list(found["x"]), found["l"], found["t"]] == [
        [0, "x", "l", "t", "o", "0.5"], [2, None], [{5: 6}, 7], ({7: 8},),
    ]  # fmt: skip
    assert type(found["o"]) is OrderedDict
    assert list(found["o"]) == [2, "1"], "the state says nothing of the key 1"
    assert torch.equal(found["o"][2], torch.ones(2))


def test_keys_that_dcp_left_alone_stay_as_they_are(tmp_path: Path) -> None:
    saved = {0: 1, "x": {2: 3, None: 1}, "o": OrderedDict([(2, 3)])}
    url = written(tmp_path, {"cfg": saved}, rewrites_keys=False)
    assert by_plain_dcp(url, "cfg") == saved
    state = {"cfg": {"other": 1}}
    load(url, state)
    assert state["cfg"] == saved
    assert open_checkpoint(url).read_all() == {"cfg": saved}


def test_read_all_gives_dcps_text_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, saved = stepped(1)
    url = written(tmp_path, {"train": {"optim": saved.state_dict()}})
    found = open_checkpoint(url).read_all()
    assert list(found["train"]["optim"]["state"]) == list(by_plain_dcp(url, "train")["optim"]["state"]) == ["0", "1"]
    assert "train.optim: the numbers of the parameters were stored as text" in caplog.text


def test_read_all_says_so_of_a_flattened_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, saved = stepped(1)
    dcp.save({"optim": saved.state_dict()}, checkpoint_id=tmp_path / "step-10", no_dist=True)
    found = open_checkpoint(tmp_path / "step-10").read_all()
    assert list(found["optim"]["state"]) == ["0", "1"]
    assert "optim: the numbers of the parameters were stored as text" in caplog.text


def test_to_torch_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, saved = stepped(1)
    url = written(tmp_path, {"optim": saved.state_dict(), "cfg": {0: 1}})
    export_torch(url, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["cfg"] == by_plain_dcp(url, "cfg") == {"0": 1}
    assert "optim: the numbers of the parameters were stored as text" in caplog.text


def test_a_copy_is_loaded_alike(tmp_path: Path) -> None:
    _, saved = stepped(1)
    url = written(tmp_path / "run", {"optim": saved.state_dict(), "w": torch.ones(4)})
    cp(url, tmp_path / "copy")
    reshard(url, tmp_path / "cut", mesh="dp_shard=2")
    for other in (tmp_path / "copy", tmp_path / "cut"):
        _, target = stepped(2, 0)
        load(other, {"optim": target, "w": torch.zeros(4)})
        assert_same_moments(target, saved)
