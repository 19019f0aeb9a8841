"""Steps with a frozen second model, own data, loss, tables, groups and schedules: on every mesh, bit-equal after a resume."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples import distill, dpo, vit
from tests.support.training_runs import read_events, read_losses
from titan_ckpt.errors import ConfigError, DataError
from titan_ckpt.trainer import (
    Accuracy,
    Constant,
    FrozenModel,
    ModelConfig,
    ModelSpec,
    Normal,
    decoder,
    fill_initial,
    run,
)
from titan_ckpt.trainer.config.extension import Extension
from titan_ckpt.trainer.config.toml_records import build_record
from titan_ckpt.trainer.config.train_config import config_type
from titan_ckpt.trainer.data.batches import BatchShape, Dataset
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.own_parts import preparation
from titan_ckpt.trainer.job.resume import Start
from titan_ckpt.trainer.parallel.config import mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, build_optimizer
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.seams.data import collate
from tools.paths import DEBUG_CONFIG, EXAMPLES
from tools.rank_pool import RankPool

STEPS, BATCH = 6, 8
MODULES: dict[str, Any] = {"dpo": dpo, "distill": distill}
MESHES: list[dict[str, Any]] = [{"dp_shard": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}]


def _extension(name: str) -> dict[str, Any]:
    """The arguments of `run` that an example's module has."""
    parts = ("model", "loss", "data", "frozen", "prepare", "tables")
    own = {part: getattr(MODULES[name], part) for part in parts if hasattr(MODULES[name], part)}
    return own | ({"frozen": {"teacher": _sure_teacher}} if name == "distill" else {})


def _sure_teacher(config: Any) -> FrozenModel:
    """A teacher with large weights: one that is not sure is at a distance below the precision of float32."""
    spec = distill.with_logits(config.teacher.model)
    large = replace(spec, initial=lambda fqn: Constant(value=1.0) if "norm" in fqn else Normal(std=0.5))
    return FrozenModel(spec=large)


def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / f"{name}.toml").read_text())


def _config(name: str, mesh: Mapping[str, Any]) -> Any:
    kind = config_type(Extension(**_extension(name)))
    return build_record(kind, _tables(name) | {"mesh": dict(mesh)}, {})


def _batch(name: str, step: int) -> dict[str, Tensor]:
    if name == "dpo":
        pairs = dpo.Pairs(16, 64, num_samples=64)
        return collate([pairs.sample(BATCH * (step % 2) + i) for i in range(BATCH)])
    tokens = torch.randint(320, (BATCH, 17), generator=torch.Generator().manual_seed(step % 2))
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def _plain(name: str) -> list[float]:
    """Plain PyTorch code: one process, two modules, torch's AdamW."""
    config = _config(name, {})
    (make,) = _extension(name)["frozen"].values()
    frozen = make(config)
    model, second = config.spec.build(), frozen.spec.build()
    fill_initial(model, config.spec, seed=1)
    fill_initial(second, frozen.spec, seed=config.train.seed)
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if (w.ndim > 1) == big], "weight_decay": 0.1 * big} for big in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch = _batch(name, step)
        loss = _plain_dpo(model, second, batch) if name == "dpo" else _plain_distillation(model, second, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain_dpo(model: Any, reference: Any, batch: dict[str, Tensor]) -> Tensor:
    def answer(of: Any, which: int) -> Tensor:
        labels = batch["labels"][:, which]
        lost = F.cross_entropy(of(batch["tokens"][:, which]).transpose(1, 2), labels, reduction="none")
        return -lost.sum(dim=1)

    with torch.no_grad():
        before = answer(reference, 0) - answer(reference, 1)
    return -F.logsigmoid(0.5 * (answer(model, 0) - answer(model, 1) - before)).mean()


def _plain_distillation(model: Any, teacher: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        wanted = (teacher(batch["tokens"]) / 2.0).softmax(dim=-1)
    found = (model(batch["tokens"]) / 2.0).log_softmax(dim=-1)
    return 4.0 * F.kl_div(found.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")


def _parallel(_rank: int, name: str, mesh: dict[str, Any]) -> list[float]:
    config = _config(name, mesh)
    model = build_parallel_model(
        config.spec, config.mesh, mesh_spec(config.mesh, 4), device=torch.device("cpu"), seed=1, loss=config.loss
    )
    prepare = preparation(config, Start(), model, ControlGroup(timeout_s=60)).run
    optimizer, losses = build_optimizer(model, OptimizerConfig(lr=3e-3)), []
    size = BATCH // model.data_degree
    for step in range(STEPS):
        batch = _batch(name, step)
        mine = {field: value[model.data_rank * size :][:size] for field, value in batch.items()}
        count = config.loss.count(batch)
        local = model.forward_backward(prepare(mine), count=count)
        losses.append(float(model.reduce_loss(local)) / count)
        model.clip_grad_norm(1.0)
        optimizer.step(3e-3)
        optimizer.zero_grad()
    return losses


@pytest.mark.dist
@pytest.mark.parametrize("name", MODULES)
def test_a_frozen_second_model_equals_plain_pytorch(ranks: RankPool, name: str) -> None:
    plain = _plain(name)
    assert plain[-1] < plain[0]
    for mesh in MESHES + ([{"cp": 2, "dp_shard": 2}] if name == "distill" else []):
        assert ranks.run(_parallel, name, mesh)[0] == pytest.approx(plain, rel=1e-5), mesh


def _run(folder: Path, steps: int, **more: Any) -> dict[int, float]:
    tables = copy.deepcopy(_tables("dpo"))
    tables["optimizer"] |= {
        "groups": [{"weights": ["**.embed_tokens.*", "lm_head.*"], "lr": 1e-4, "weight_decay": 0.0}]
    }
    tables |= {
        "validation": {"every": 2, "fraction": 0.1, "samples": 4},
        "log": {"tensorboard": False, "progress": False},
    }
    sets = (f"save.url={folder}", f"train.steps={steps}", "train.device=cpu", "train.global_batch_size=6")
    run(tables, sets=sets, schedule=lambda step, _total: 1.0 / (step + 1), **_extension("dpo") | more)
    return read_losses(folder)


def test_own_parts_go_on_bit_equal_after_a_resume(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", 4)
    _run(tmp_path / "halves", 2)
    assert _run(tmp_path / "halves", 4) == whole
    rates = [record["lr"] for record in read_events(tmp_path / "halves")]
    assert rates == pytest.approx([1e-3, 1e-3 / 2, 1e-3 / 3, 1e-3 / 4])
    assert [record["tokens"] for record in read_events(tmp_path / "halves", "validation")] == [4, 4]
    other = dpo.Pairs(32, 64, num_samples=512)
    with pytest.raises(DataError, match="was trained on other data"):
        _run(tmp_path / "halves", 5, data=lambda _config: other)


class _Threes:
    """A metric whose value is known: the share of class 3."""

    def __call__(self, _output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["labels"] == 3).sum()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["labels"] != -100).sum())


def test_metrics_and_validation_sets_have_numbers_of_their_own(tmp_path: Path) -> None:
    tables = tomllib.loads((EXAMPLES / "vit.toml").read_text())
    tables |= {"log": {"tensorboard": False, "progress": False}, "validation": {"every": 2, "samples": 24}}
    few = {"few": lambda config: vit.Images(config.model, num_samples=17)}
    metrics = {"threes": _Threes(), "accuracy": Accuracy()}
    sets = (f"log.folder={tmp_path}", "train.steps=2", "train.device=cpu", "model.dim=32", "model.n_layers=2")
    parts: dict[str, Any] = {"model": vit.model, "data": vit.data}
    parts |= {"validation": few, "metrics": metrics}
    run(tables, sets=sets, **parts)
    run(tables, sets=(*sets, "validation.fraction=0.02", "train.steps=2"), **parts)
    alone, held_out, few_again = read_events(tmp_path, "validation")
    assert (alone["set"], alone["tokens"], alone["threes"]) == ("few", 17, 2 / 17)
    assert ("set" in held_out, held_out["tokens"]) == (False, 24)
    assert few_again["threes"] == alone["threes"]
    right = alone["accuracy"] * 17
    assert 0 <= right <= 17
    assert right == pytest.approx(round(right))
    with pytest.raises(ConfigError, match="metrics: 'loss' is a field"):
        run(tables, **parts | {"metrics": {"loss": Accuracy()}})


class _Half:
    """Cross-entropy of every second label, each `times` over."""

    def __init__(self, times: int) -> None:
        self.times = times

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"].clone()
        labels[..., ::2] = -100
        return labels.flatten()

    def __call__(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.times * F.cross_entropy(output.float().flatten(0, -2), self._labels(batch), reduction="sum")

    def count(self, batch: Mapping[str, Tensor]) -> int:
        return self.times * int((self._labels(batch) != -100).sum())


class _Whole(_Half):
    """Cross-entropy of all labels."""

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        return batch["labels"].flatten()


def _scored(config: ModelConfig) -> ModelSpec:
    """A decoder of the trainer that returns scores, as it is not given the labels."""
    return replace(decoder(config), inputs=("tokens", "positions"))


def test_the_count_of_an_own_loss_is_what_its_sum_is_divided_by(tmp_path: Path, cache: str) -> None:
    """Also on the trainer's own data, of which it knows how many labels there are."""
    sets = (f"data.cache={cache}", "train.steps=2", "train.device=cpu", "log.tensorboard=false")
    found = []
    for name, own in {"half": _Half(1), "thrice": _Half(3), "whole": _Whole(1)}.items():
        run(DEBUG_CONFIG, sets=(*sets, f"save.url={tmp_path / name}"), model=_scored, loss=own)
        found.append(read_events(tmp_path / name))
    for half, thrice, other in zip(*found, strict=True):
        assert half["loss"] == pytest.approx(thrice["loss"], rel=1e-5)
        assert half["grad_norm"] == pytest.approx(thrice["grad_norm"], rel=1e-4)
        assert half["loss"] == pytest.approx(other["loss"], rel=0.1)


def test_a_frozen_model_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    _run(tmp_path / "first", 2)
    frozen = {"reference": lambda config: FrozenModel(spec=config.spec, start=f"{tmp_path}/first")}
    trained = _run(tmp_path / "second", 2, frozen=frozen)
    assert trained[1] != pytest.approx(_run(tmp_path / "third", 2)[1], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": {"groups": [{"weights": ["embed.*"]}]}},
            "'embed.\\*' matches no weight; one is called model.embed",
        ),
        ({"optimizer": {"groups": [{"weights": ["**"], "lr": 0.0}]}}, "lr > 0"),
        ({"dpo": {"gamma": 1.0}}, "unknown key dpo.gamma; known here: dpo.beta, dpo.reference"),
        ({"dpo": {"beta": "much"}}, "dpo.beta: expected a number"),
    ],
)
def test_what_an_own_step_cannot_have_is_refused(change: dict[str, Any], message: str) -> None:
    tables = _tables("dpo")
    merged = {name: tables.get(name, {}) | change.get(name, {}) for name in {*tables, *change}}
    with pytest.raises(ConfigError, match=message):
        run(merged, sets=("mesh.dp_shard=1",), **_extension("dpo"))


def test_a_name_of_the_trainers_tables_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="'mesh' is a table of the trainer"):
        run(_tables("dpo"), **_extension("dpo") | {"tables": {"mesh": dpo.DpoConfig}})


def test_a_batch_is_filled_up_with_samples_that_do_not_count() -> None:
    images = Dataset([vit.Images(vit.VitConfig(), 9)], [1.0], seq_len=1, seed=0, shuffle=True)
    batch = images.batch(0, BatchShape(global_batch_size=5, microbatch_size=3, data_rank=1, data_degree=2))
    (part,) = batch.microbatches
    assert batch.count == 5
    assert (part["labels"] != -100).sum() == 2
    assert part["images"].shape == (3, 3, 32, 32)
