"""A validator of one's own: numbers of each set on several meshes, through `train` and `eval`; hooks whose state is saved."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from examples import vit
from tests.support.training_runs import read_events
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import CheckpointError, ConfigError
from titan_ckpt.saving.saver import SaveOptions, save
from titan_ckpt.trainer import Evaluation, Hooks, Means, run
from titan_ckpt.trainer.config.extension import Extension
from titan_ckpt.trainer.config.toml_records import build_record
from titan_ckpt.trainer.config.train_config import config_type
from titan_ckpt.trainer.data.batches import Dataset
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.own_parts import HookCalls, preparation
from titan_ckpt.trainer.job.resume import Start, TrainingProgress, live_state, pipeline_record, restore, training_record
from titan_ckpt.trainer.job.setup import Data, open_validation
from titan_ckpt.trainer.parallel.config import mesh_spec
from titan_ckpt.trainer.parallel.optimizer import build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.boundary import OwnCodeError
from tools.paths import EXAMPLES
from tools.rank_pool import RankPool

SMALL = ("train.device=cpu", "model.dim=32", "model.n_layers=2")


def _run(folder: Path, *sets: str, **parts: Any) -> None:
    tables = tomllib.loads((EXAMPLES / "vit.toml").read_text())
    tables |= {"log": {"tensorboard": False, "progress": False}, "validation": {"every": 2, "samples": 10}}
    usual = (f"save.url={folder}", "train.steps=2", *SMALL, "optimizer.schedule=constant", "train.global_batch_size=8")
    few = {"few": lambda config: vit.Images(config.model, num_samples=7)}
    run(tables, sets=(*usual, *sets), model=vit.model, data=vit.data, validation=few, **parts)


@dataclass(frozen=True)
class _Largest:
    """The share of samples whose largest logit is right, and the largest logit of all, from the model's outputs."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        right = seen = 0.0
        for batch in evaluation.microbatches:
            logits = evaluation.outputs(batch)
            if logits is not None:
                right += float((logits.argmax(dim=-1) == batch["labels"]).sum())
                seen += float((batch["labels"] != -100).sum())
        right, seen = evaluation.total([right, seen])
        return {"loss": evaluation.means()["loss"], "right": right, "seen": seen, "at": float(evaluation.step)}


def test_a_validator_sees_outputs_and_means_of_each_set(tmp_path: Path) -> None:
    _run(tmp_path / "own", "validation.fraction=0.02", validator=_Largest())
    _run(tmp_path / "plain", "validation.fraction=0.02", validator=Means())
    own, plain = (read_events(tmp_path / name, "validation") for name in ("own", "plain"))
    assert [record.get("set") for record in own] == [None, "few"]
    assert [record["seen"] for record in own] == [10, 7]
    assert [record["loss"] for record in own] == [record["loss"] for record in plain]
    assert all(0 <= record["right"] <= record["seen"] and record["at"] == 2 for record in own)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (0.5, "Validator returned 0.5, expected numbers by name"),
        ({"step": 1.0}, "Validator returned 'step': 1.0, expected a number of another name"),
        ({"loss": torch.zeros(2)}, "Validator returned 'loss': a Tensor, expected a number"),
    ],
)
def test_what_a_validator_cannot_return_is_refused(tmp_path: Path, answer: Any, said: str) -> None:
    with pytest.raises(OwnCodeError, match=said):
        _run(tmp_path, validator=lambda _evaluation: answer)


def test_a_class_is_not_a_validator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"validator is the class _Largest, expected an object: _Largest\(...\)"):
        _run(tmp_path, validator=_Largest)


class _Counting(Hooks):
    """Remembers the norms of gradients, and their sum as a tensor."""

    def __init__(self) -> None:
        self.norms, self.total, self.loads = list[float](), torch.zeros(3), 0

    def after_step(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        self.norms.append(numbers["grad_norm"])
        self.total += numbers["grad_norm"]
        return {"seen": float(len(self.norms)), "at": float(step)}

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms, self.total, self.loads = list(state["norms"]), state["total"].clone(), self.loads + 1


def _evaluated(_rank: int, mesh: dict[str, int], start: str, url: str) -> tuple[list[Any], list[float]]:
    """The numbers of two sets on a mesh, and the norms that hooks have after a load from `start`; then saves at `url`."""
    kind = config_type(Extension(model=vit.model, data=vit.data, validator=_Largest()))
    tables = tomllib.loads((EXAMPLES / "vit.toml").read_text()) | {"mesh": mesh}
    config: Any = build_record(kind, tables, {})
    control = ControlGroup(timeout_s=60)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    spec = mesh_spec(config.mesh, world_size)
    model = build_parallel_model(config.spec, config.mesh, spec, device=torch.device("cpu"), seed=1, loss=config.loss)
    images = [vit.Images(config.model, num_samples=count) for count in (64, 7)]
    sets = [Dataset([some], [1.0], seq_len=1, seed=0, shuffle=False, held_out=0.1) for some in images]
    data = Data(dataset=sets[0], sets={"few": sets[1]}, tokenizer=None)
    validation = open_validation(config, model, control, data, preparation(config, Start(), model, control).run)
    found = [(name, numbers) for name, numbers, _ in validation.run(3)]
    counting = _Counting()
    hooks, optimizer = HookCalls(counting), build_optimizer(model, config.optimizer)
    counting.norms = [0.5, 0.25]
    if start:
        counting.norms = []
        restore(
            Start(checkpoint=open_checkpoint(start), is_own=True), model, optimizer,
            control=control, fingerprint="images", other_data=False, hooks=hooks.kept(),
        )  # fmt: skip
    options = SaveOptions(mesh=spec, pipeline=pipeline_record(model.plan, config.mesh, spec), timeout_s=60)
    record = training_record(TrainingProgress(step=3), fingerprint="images", seed=1, lr=1e-3)
    save(url, live_state(model, optimizer) | hooks.kept(), step=3, options=options, training=record)
    return found, counting.norms


@pytest.mark.dist
def test_numbers_and_hooks_are_the_same_on_other_meshes(ranks: RankPool, tmp_path: Path) -> None:
    plain, _ = _evaluated(0, {}, "", str(tmp_path / "one"))
    dist.destroy_process_group()
    before = str(tmp_path / "one")
    for mesh in ({"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}):
        after = str(tmp_path / "-".join(mesh))
        for found, norms in ranks.run(_evaluated, mesh, before, after):
            assert norms == [0.5, 0.25]
            for (name, numbers), (same, expected) in zip(found, plain, strict=True):
                assert name == same
                assert numbers == pytest.approx(expected, rel=1e-5), mesh
        before = after


def test_hooks_go_on_where_they_were(tmp_path: Path) -> None:
    whole, before, after = _Counting(), _Counting(), _Counting()
    _run(tmp_path / "whole", "train.steps=4", hooks=whole)
    _run(tmp_path / "halves", hooks=before)
    _run(tmp_path / "halves", "train.steps=4", hooks=after)
    assert (before.loads, after.loads) == (0, 1)
    assert after.norms == whole.norms
    assert torch.equal(after.total, whole.total)
    assert [record["seen"] for record in read_events(tmp_path / "halves", "own")] == [1, 2, 3, 4]


def test_a_state_of_hooks_is_never_dropped_silently(tmp_path: Path) -> None:
    _run(tmp_path / "with", hooks=_Counting())
    _run(tmp_path / "with", "train.steps=3")
    _run(tmp_path / "without")
    _run(tmp_path / "without", "train.steps=3", hooks=_Counting())
    logs = [(tmp_path / name / "logs" / "rank_00000.log").read_text() for name in ("with", "without")]
    assert "has a state of hooks, which this run does not take" in logs[0]
    assert "has no state of hooks; they start anew" in logs[1]
    assert not any(name.startswith("hooks") for name in open_checkpoint(str(tmp_path / "with")).manifest.by_fqn)


class _Broken(_Counting):
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        raise KeyError(*sorted(state)[:1])


def test_hooks_that_cannot_take_their_state_are_named(tmp_path: Path) -> None:
    _run(tmp_path, hooks=_Counting())
    with pytest.raises(
        CheckpointError, match=r"hooks: .*test_validators.py:\d+ in load_state_dict: .* raised KeyError"
    ):
        _run(tmp_path, "train.steps=3", hooks=_Broken())
