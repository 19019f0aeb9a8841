"""Hooks around the step, a step of one's own, and what they may not return."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import vit
from tests.support.training_runs import read_events, read_losses
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer import Hooks, StepModel, run
from titan_ckpt.trainer.seams.boundary import OwnCodeError
from tools.paths import EXAMPLES


def _run(folder: Path, **parts: Any) -> dict[int, float]:
    tables = tomllib.loads((EXAMPLES / "vit.toml").read_text())
    tables |= {"log": {"tensorboard": False, "progress": False}}
    sets = (f"log.folder={folder}", "train.steps=3", "train.device=cpu", "model.dim=32", "model.n_layers=2")
    run(tables, sets=sets, model=vit.model, data=vit.data, **parts)
    return read_losses(folder)


class _Noted(Hooks):
    """Notes every call, and makes gradients smaller."""

    def __init__(self, factor: float) -> None:
        self.factor, self.calls = factor, list[tuple[str, int]]()

    def before_step(self, step: int) -> None:
        self.calls.append(("before", step))

    def after_backward(self, step: int, weights: Mapping[str, nn.Parameter]) -> None:
        self.calls.append(("backward", step))
        for weight in weights.values():
            assert weight.grad is not None
            weight.grad.mul_(self.factor)

    def after_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        self.calls.append(("after", step))
        return {"half_norm": numbers["grad_norm"] / 2, "seen": numbers["loss"]}


def test_hooks_see_each_step_and_change_gradients(tmp_path: Path) -> None:
    plain = _run(tmp_path / "plain")
    hooks = _Noted(0.5)
    losses = _run(tmp_path / "hooked", hooks=hooks)
    assert hooks.calls == [(name, step) for step in (1, 2, 3) for name in ("before", "backward", "after")]
    norms = [[record["grad_norm"] for record in read_events(tmp_path / name)] for name in ("plain", "hooked")]
    assert norms[1][0] == pytest.approx(norms[0][0] / 2)
    own = read_events(tmp_path / "hooked", "own")
    assert [record["half_norm"] for record in own] == [norm / 2 for norm in norms[1]]
    assert {record["step"]: record["seen"] for record in own} == losses
    assert losses[1] == plain[1]


def _as_usual(microbatches: Sequence[Mapping[str, Tensor]], model: StepModel, *, step: int) -> Tensor:
    assert step > 0
    return torch.stack([model.forward_backward(microbatch) for microbatch in microbatches]).sum()


def _twice(microbatches: Sequence[Mapping[str, Tensor]], model: StepModel, *, step: int) -> Tensor:
    _as_usual(microbatches, model, step=step)
    return _as_usual(microbatches, model, step=step)


def test_an_own_step_equals_the_trainers_or_differs(tmp_path: Path) -> None:
    plain = _run(tmp_path / "plain")
    assert _run(tmp_path / "own", train_step=_as_usual) == plain
    assert _run(tmp_path / "twice", train_step=_twice)[1] == plain[1]
    first, second = (read_events(tmp_path / name)[0]["grad_norm"] for name in ("plain", "twice"))
    assert second == pytest.approx(2 * first)


class _Wrong(Hooks):
    def after_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        return {"step": numbers["lr"] * step}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"hooks": _Wrong()}, "Hooks.after_step returned 'step': .*, expected a number of another name"),
        ({"train_step": lambda *_, **__: None}, "train_step returned None, expected the sum of the losses"),
    ],
)
def test_wrong_answers_are_refused(tmp_path: Path, parts: dict[str, Any], said: str) -> None:
    with pytest.raises(OwnCodeError, match=said):
        _run(tmp_path, **parts)


def test_hooks_must_be_hooks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected an object of a subclass of Hooks"):
        _run(tmp_path, hooks=lambda step: step)
