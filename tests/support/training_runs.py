"""Whole training runs in tests: their command line and recorded results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from tools.paths import DEBUG_CONFIG

FREEZE = ('train.freeze=["model.layers.0.*", "*embed_tokens*"]', "train.steps=3", "save.every=1")


def train_arguments(cache: str, url: object, *sets: str) -> list[str]:
    fixed = [f"data.cache={cache}", f"save.url={url}", "log.tensorboard=false", "train.device=cpu"]
    return ["train", DEBUG_CONFIG, *(part for text in [*fixed, *sets] for part in ("--set", text))]


def train(cache: str, url: object, *sets: str) -> int:
    return main(train_arguments(cache, url, *sets))


def read_events(folder: Path, event: str = "step") -> list[dict[str, Any]]:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def read_losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_events(folder)}


# ------------------------------------------------------------------------------------------------- one rank


def changed_between(url: Path, first: int, last: int) -> list[str]:
    """The weights that differ."""
    before, after = (open_checkpoint(str(url), step=step) for step in (first, last))
    names = [tensor.fqn for tensor in before.manifest.tensors if tensor.fqn.startswith("model.")]
    return [name for name in names if not torch.equal(before.read(name), after.read(name))]


def changed_weights(url: Path) -> dict[str, bool]:
    """Whether each weight differs between steps 1 and 3."""
    first, last = (open_checkpoint(str(url), step=step) for step in (1, 3))
    names = [tensor.fqn for tensor in first.manifest.tensors if tensor.fqn.startswith("model.")]
    return {name: not torch.equal(first.read(name), last.read(name)) for name in names}


def is_frozen(name: str) -> bool:
    return ".layers.0." in name or "embed_tokens" in name
