"""`model.from`: the shape, the weights and the tokenizer of a Hugging Face folder or checkpoint, without typing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import ConfigError, TitanError
from titan_ckpt.location import parse_location, redact
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.config.toml_records import Origins, Tree, toml_value

FROM = "from"
FREE = ("max_seq_len",)  # may differ from the model's: positions are computed for the sequence at hand
AHEAD = "ahead"  # may get a weight, or be left out with depth = 0
TOKENIZER = "tokenizer.json"


def fill_from(tree: Tree, origins: Origins) -> None:
    """Put what `model.from` names into `tree`, in place: [model], and resume.from and data.tokenizer where they are not set.

    ConfigError if it is no model, or if the tree says otherwise.
    """
    model = tree.get("model")
    if not isinstance(model, dict) or FROM not in model:
        return
    url, origin = model.pop(FROM), origins.get("model.from", "config")
    if not isinstance(url, str) or not url:
        raise ConfigError(f"{origin}: model.from: expected a folder or URL, found {toml_value(url)}")
    shown = redact(url)
    try:
        checkpoint = open_checkpoint(url)
    except TitanError as error:
        raise ConfigError(f"{origin}: model.from = {shown}: {error}") from error
    found = checkpoint.manifest.config.get("model")
    if not isinstance(found, Mapping):
        raise ConfigError(f"{origin}: model.from = {shown}: {checkpoint} records no shape; write the keys of [model]")
    found = _with_ahead(model, found)
    differing = [
        f"{key} = {toml_value(ours)} is {toml_value(theirs)} there" for key, ours, theirs in conflicts(model, found)
    ]
    if differing:
        raise ConfigError(f"[model] contradicts model.from = {shown}: {', '.join(differing)}; leave these out")
    for key, value in found.items():
        if value is not None and key not in model:
            model[key] = _without_none(value)
            origins[f"model.{key}"] = f"model.from = {shown}"
    _default(tree, "resume", FROM, url, origins, shown)
    if parse_location(url).step is None and open_store(url).exists(TOKENIZER):
        _default(tree, "data", "tokenizer", url, origins, shown)


def _with_ahead(model: Tree, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """`found` with the weight of `[model.ahead]` that `model` gives; without the modules if its depth is 0."""
    ours, theirs = model.get(AHEAD), found.get(AHEAD)
    if not isinstance(ours, dict) or not isinstance(theirs, Mapping):
        return found
    if ours.get("depth") == 0:
        del model[AHEAD]
        return {key: value for key, value in found.items() if key != AHEAD}
    model[AHEAD] = {**theirs, **ours}
    return {**found, AHEAD: {**theirs, "weight": model[AHEAD].get("weight")}}


def _default(tree: Tree, table: str, key: str, value: str, origins: Origins, shown: str) -> None:
    values = tree.setdefault(table, {})
    if isinstance(values, dict) and key not in values:
        values[key] = value
        origins[f"{table}.{key}"] = f"model.from = {shown}"


def _without_none(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def conflicts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Keys in both whose values do not mean the same."""
    for key, value in ours.items():
        if key in theirs and key not in FREE and not means_the_same(value, theirs[key]):
            yield key, value, theirs[key]


def means_the_same(one: Any, other: Any) -> bool:
    """Whether two values of [model] compute the same: numbers with a point as float32.

    >>> means_the_same(1e-5, 9.999999747378752e-06), means_the_same(10_000, 1e4), means_the_same(1e-5, 1e-6)
    (True, True, False)
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(means_the_same(one.get(key), other.get(key)) for key in {*one, *other})
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, other))
    if is_number and float in (type(one), type(other)):
        return abs(one) < 1e38 and bool(np.float32(one) == np.float32(other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
