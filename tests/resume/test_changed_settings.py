"""Every setting is classified by what it does to the result, and a resume refuses or says what changes it."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from tests.support.training_runs import train
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import ConfigError
from titan_ckpt.saving.saver import Saver
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.job.changed_settings import EFFECTS, Effect, check_settings
from titan_ckpt.trainer.parallel.config import ParallelConfig


def records_in(kind: Any) -> list[Any]:
    """The config records that a field's type mentions."""
    if dataclasses.is_dataclass(kind):
        return [kind]
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType, tuple) else ()
    return [record for part in parts for record in records_in(part)]


def names_of(kind: Any, prefix: str = "") -> list[str]:
    """Every field of a tree of records, dotted, as in TOML; a table itself is named where its parts are compared as one."""
    found = []
    for field in dataclasses.fields(kind):
        name = prefix + field.name.rstrip("_")
        inner = records_in(get_type_hints(kind)[field.name])
        found += [name] if prefix else []
        for record in inner:
            found += names_of(record, f"{name}.")
    return found


def test_every_setting_is_classified_once() -> None:
    assert sorted(names_of(TrainConfig)) == sorted(EFFECTS)
    assert set(EFFECTS.values()) == set(Effect)


def test_a_new_setting_without_a_class_is_noticed() -> None:
    grown = dataclasses.make_dataclass("Grown", [("added", int, 0)], bases=(ParallelConfig,), frozen=True, kw_only=True)
    assert set(names_of(grown, "mesh.")) - set(EFFECTS) == {"mesh.added"}


def test_what_changes_the_result_is_said_at_resume(tmp_path: Path, cache: str) -> None:
    assert train(cache, tmp_path, "train.steps=1") == 0
    sets = (
        "data.document_masks=true",
        "mesh.param_dtype=bfloat16",
        "optimizer.betas=[0.8, 0.9]",
        'train.freeze=["*embed*"]',
    )
    assert train(cache, tmp_path, "train.steps=2", *sets, "mesh.activation_checkpoint=full", "log.every=2") == 0
    log_text = (tmp_path / "logs" / "rank_00000.log").read_text()
    assert (
        "changed since the checkpoint: mesh.param_dtype: float32 -> bfloat16, data.document_masks: False -> True, "
        "optimizer.betas: [0.9, 0.95] -> [0.8, 0.9], train.steps: 1 -> 2, train.freeze: [] -> ['*embed*']\n"
    ) in log_text


BEFORE: dict[str, Any] = {
    "mesh": {"param_dtype": "float32", "float8": "none", "float8_all_gather": False, "tp": 1},
    "data": {"document_masks": False, "prefetch": 2},
    "lora": {"rank": 0, "alpha": 16.0, "targets": ["q_proj"]},
    "train": {"steps": 2},
}


def check(tmp_path: Path, before: dict[str, Any], now: dict[str, Any], *, is_own: bool = True) -> None:
    """Compare two configs as a resume does."""
    with Saver(str(tmp_path / "run")) as saver:
        saver.save({"model": {}, "n": 1}, step=1, config=before).wait()
    check_settings(open_checkpoint(str(tmp_path / "run")), now, is_own=is_own)


def changed(**tables: dict[str, Any]) -> dict[str, Any]:
    """The config with some settings changed."""
    return {name: table | tables.get(name, {}) for name, table in BEFORE.items()}


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("mesh", "float8", "rowwise"), ("mesh", "float8_all_gather", True), ("mesh", "param_dtype", "bfloat16")],
)
def test_precision_is_said(tmp_path: Path, table: str, key: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    check(tmp_path, BEFORE, changed(**{table: {key: value}}))
    assert f"{table}.{key}: {BEFORE[table][key]} -> {value}" in caplog.text


def test_a_setting_in_a_table_of_a_table_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, now = ({"model": {"dim": 8, "ahead": {"depth": 1, "weight": weight}}} for weight in (0.3, 0.1))
    check(tmp_path, before, now)
    assert "model.ahead.weight: 0.3 -> 0.1" in caplog.text


@pytest.mark.parametrize(("key", "value"), [("alpha", 32.0), ("rank", 4), ("targets", ["q_proj", "k_proj"])])
def test_adapters_with_other_settings_are_refused(
    tmp_path: Path, key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = changed(lora={"rank": 8})
    with pytest.raises(ConfigError, match=f"lora.{key}: .* -> .*; set them back"):
        check(tmp_path, before, changed(lora={"rank": 8, key: value}))
    check(tmp_path, BEFORE, changed(lora={"alpha": 1.0}))  # no run has adapters
    check(tmp_path, before, changed(lora={"rank": 8, key: value}), is_own=False)
    assert "lora" not in caplog.text


def test_what_changes_nothing_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check(tmp_path, BEFORE, changed(mesh={"tp": 2}, data={"prefetch": 9}))
    check(tmp_path / "old", {}, BEFORE)
    check(tmp_path / "odd", {"mesh": 7, "data": {}}, BEFORE)
    assert "changed since" not in caplog.text


def test_lora_alpha_is_compared_by_a_run(tmp_path: Path, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(cache, tmp_path / "base", "train.steps=1") == 0
    lora = (f"resume.from={tmp_path}/base", "lora.rank=2")
    assert train(cache, tmp_path / "run", *lora, "train.steps=1") == 0
    assert train(cache, tmp_path / "run", *lora, "train.steps=2", "lora.alpha=1.0") == 2
    assert "lora.alpha: 16.0 -> 1.0" in capsys.readouterr().err
    assert train(cache, tmp_path / "run", *lora, "train.steps=2") == 0


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_averages_do_not_begin_or_end_within_a_run(
    tmp_path: Path, cache: str, decay: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, "train.steps=1", f"optimizer.ema_decay={decay}") == 0
    capsys.readouterr()
    assert train(cache, tmp_path, "train.steps=2", f"optimizer.ema_decay={0.9 - decay}") == 2
    error = capsys.readouterr().err
    assert (
        f"has {'' if decay else 'no '}averages of the weights, but optimizer.ema_decay is {0.9 - decay} here" in error
    )
    assert "missing from the checkpoint" not in error
