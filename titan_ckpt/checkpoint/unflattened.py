"""Mappings whose keys DCP has made text: those that it stores as one value (`flatten_state_dict=False`), and all of its nesting.

`DefaultSavePlanner` rewrites every mapping outside of tuples as a dict with `str(key)` as keys, and leaves out empty ones
(torch 2.13, `_sharded_tensor_utils.py`), unless `flatten_sharded_tensors=False`. A state to be loaded knows better, and so does
an optimizer's list of parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.format.structure import empty_of, kind_of

log = logging.getLogger(__name__)


def with_keys_of(present: Any, value: Any) -> Any:
    """`value` with the keys and containers of `present` where the text is the same; numbers for an optimizer's parameters."""
    if type(value) is list and isinstance(present, list) and not {dict, list}.isdisjoint(map(type, value)):
        return [with_keys_of(a, b) for a, b in zip_longest(present[: len(value)], value)]
    if type(value) is not dict or not isinstance(present, dict):
        return value
    keys = {str(key): key for key in present}
    found = empty_of(kind_of(present))
    for text, inner in value.items():
        key = keys.get(text, text)
        found[key] = with_keys_of(present.get(key), inner)
    if "param_groups" in present and (numbers := _numbers(found)):
        moments = found.get("state", {})  # DCP leaves it out if it is empty
        found["state"] = {numbers.get(key, key): inner for key, inner in moments.items()}
    return found


def warn_of_text(checkpoint: Checkpoint, state: Any, above: str = "") -> None:
    """Log the optimizers below the name `above` whose parameters' numbers have become text."""
    for name in _with_text_as_numbers(state, above):
        log.warning(
            "%s: %s: the numbers of the parameters were stored as text, under which `load_state_dict` finds no moments: give the "
            "optimizer itself to `titan_ckpt.load`", checkpoint, name,
        )  # fmt: skip


def _with_text_as_numbers(value: Any, above: str) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(inner, Mapping | list):
            name = f"{above}{key}"
            moments = inner.get("state") if isinstance(inner, Mapping) else None
            if isinstance(moments, Mapping) and not moments.keys().isdisjoint(_numbers(inner)):
                yield name
            yield from _with_text_as_numbers(inner, f"{name}.")


def _numbers(state: Any) -> dict[str, int]:
    """The numbers of an optimizer's parameters by their text; none for any other mapping."""
    groups = state.get("param_groups")
    lists = [each.get("params") for each in groups if isinstance(each, Mapping)] if isinstance(groups, list) else []
    return {str(each): each for params in lists if isinstance(params, list) for each in params if type(each) is int}
