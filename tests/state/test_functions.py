"""Functions in a state: stored by name, made again only where the state or the caller names them, and never called."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_ckpt import load, open_checkpoint, save
from titan_ckpt.errors import UnsafeContentError
from titan_ckpt.parsing.value_archive import write_archive
from titan_ckpt.parsing.values import decode_value
from titan_ckpt.state.classes import allowed_by

CALLS: list[float] = []


def halved(value: float = 2.0) -> float:
    CALLS.append(value)
    return value / 2


class Rate:
    """A class with a method of its own."""

    @classmethod
    def halved(cls) -> float:
        """Half a rate."""
        return 0.5


@pytest.mark.parametrize(
    "value",
    [
        halved,
        len,
        open,
        getattr,
        torch.nn.functional.relu,
        torch.relu,
        np.add,
        str.upper,
        Rate.halved,
        {"nested": {"rate": halved}},
        (halved, [len]),
        {halved},
        defaultdict(halved, {1: 2.0}),
    ],
)
def test_functions_come_back_by_name(value: Any, tmp_path: Path) -> None:
    save(str(tmp_path), {"value": value}, step=1)
    state: dict[str, Any] = {"value": copy.deepcopy(value)}
    load(str(tmp_path), state)
    assert state["value"] == value
    assert type(state["value"]) is type(value)


def test_a_function_without_a_place_in_the_state_must_be_named(tmp_path: Path) -> None:
    save(str(tmp_path), {"value": [halved]}, step=1)
    with pytest.raises(UnsafeContentError, match=r"test_functions\.halved.*LoadPolicy\(allow=\[halved\]\)"):
        open_checkpoint(str(tmp_path)).read_all()
    assert open_checkpoint(str(tmp_path)).read_all("value", allow=[halved]) == [halved]


def test_a_partial_comes_back_with_its_function(tmp_path: Path) -> None:
    value = functools.partial(halved, 8.0)
    save(str(tmp_path), {"value": value}, step=1)
    state: dict[str, Any] = {"value": functools.partial(halved, 1.0)}
    load(str(tmp_path), state)
    assert (state["value"].func, state["value"].args) == (halved, (8.0,))


def test_a_file_never_calls_a_function_that_the_state_holds() -> None:
    with pytest.raises(UnsafeContentError, match=r"test_functions\.halved"):
        decode_value(_call_of(halved, 4.0), where="value", allowed=allowed_by([halved]))
    assert CALLS == []


def _call_of(function: Callable[..., Any], *arguments: Any) -> bytes:
    class _Call:
        def __reduce__(self) -> Any:
            return function, arguments

    return write_archive(pickle.dumps(_Call(), protocol=2))
