"""Containers of other types than a checkpoint's structure has: they come back as plain ones, and the save says so."""

from collections import ChainMap, Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from titan_ckpt import load, open_checkpoint, save

WEIGHT = torch.ones(2)


class Items(list[Any]):
    """A list of the caller's."""


class Fields(dict[str, Any]):
    """A mapping of the caller's."""


Pair = namedtuple("Pair", "a b")

REDUCED: dict[str, tuple[Any, type]] = {
    "Items": (Items([WEIGHT, 1]), list),
    "Fields": (Fields(w=WEIGHT), dict),
    "ChainMap": (ChainMap({"w": WEIGHT}, {"x": 1}), dict),
    "mappingproxy": (MappingProxyType({"w": WEIGHT}), dict),
    "defaultdict": (defaultdict(lambda: 3, w=WEIGHT), dict),
}


@pytest.mark.parametrize("name", REDUCED)
def test_the_save_says_what_comes_back_plain(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    value, plain = REDUCED[name]
    save(tmp_path, {"m": {"v": value, "again": value}}, step=1)
    assert f"m.v: a {name} comes back as a {plain.__name__} from `read_all`" in caplog.text
    assert ", and 1 more;" in caplog.text
    assert type(open_checkpoint(tmp_path).read_all()["m"]["v"]) is plain


def test_nothing_is_said_of_what_comes_back_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "o": OrderedDict(w=WEIGHT), "c": Counter("ab"), "d": defaultdict(list, w=[WEIGHT]), "l": [WEIGHT], "t": Pair(1, WEIGHT),
        "module": torch.nn.Linear(2, 2), "i": Items([1, 2]),
    }  # fmt: skip
    save(tmp_path, state, step=1)
    assert "comes back as" not in caplog.text
    found = open_checkpoint(tmp_path).read_all(allow=[Pair, Items])
    assert [type(found[key]) for key in "ocdlti"] == [OrderedDict, Counter, defaultdict, list, Pair, Items]


def test_a_load_keeps_the_containers_of_the_state(tmp_path: Path) -> None:
    save(tmp_path, {"v": Items([WEIGHT, 1])}, step=1)
    state = {"v": Items([torch.zeros(2), 0])}
    load(tmp_path, state)
    assert type(state["v"]) is Items
    assert torch.equal(state["v"][0], WEIGHT)
