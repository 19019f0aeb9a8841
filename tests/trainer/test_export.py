"""Background Hugging Face exports: complete, from committed checkpoints; a failed export never stops training."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import config as model_config
from tests.support.hf_models import contents, tensors
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.trainer.config.train_config import ExportConfig
from titan_ckpt.trainer.job.export import Exporter, ExportOutcome
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.paths import DEBUG_CONFIG

STEPS = (2, 4, 6, 7)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small model with four checkpoints."""
    folder = tmp_path_factory.mktemp("export") / "run"
    of = {"model": spec_to_config(spec_from_hf(model_config(), "test"))}
    with Saver(str(folder)) as saver:
        for step in STEPS:
            saver.save({"model": tensors(model_config(), seed=step)}, step=step, config=of).wait()
    return folder


def _exporter(run: Path, url: str, outcomes: list[ExportOutcome], **changes: Any) -> Exporter:
    config = dataclasses.replace(ExportConfig(every=2, url=url), **changes)
    return Exporter(config, str(run), outcomes.append)


def _never() -> bool:
    return False


def test_newest_checkpoint_wins_and_the_last_is_exported_too(run: Path, tmp_path: Path) -> None:
    outcomes: list[ExportOutcome] = []
    with _exporter(run, str(tmp_path), outcomes) as exporter:
        for step in (2, 2, 4, 6):
            exporter.poll(step)
        assert exporter.steps() == {2, 6}
        exporter.finish(7, is_stopped=_never)
        assert exporter.steps() == frozenset()
    assert [(outcome.step, outcome.problem) for outcome in outcomes] == [(2, ""), (7, "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-7"]
    export_hf(f"{run}@7", str(tmp_path / "plain"))
    assert contents(tmp_path / "checkpoint-7") == contents(tmp_path / "plain")


def test_checkpoint_between_two_exports_is_left_out(run: Path, tmp_path: Path) -> None:
    outcomes: list[ExportOutcome] = []
    with _exporter(run, str(tmp_path), outcomes, every=4) as exporter:
        exporter.poll(2)
        assert exporter.steps() == frozenset()


@pytest.mark.s3
def test_export_goes_to_a_bucket_in_another_dtype(run: Path, s3_url: str) -> None:
    outcomes: list[ExportOutcome] = []
    with _exporter(run, s3_url, outcomes, dtype="bfloat16") as exporter:
        exporter.finish(6, is_stopped=_never)
    assert [outcome.problem for outcome in outcomes] == [""]
    found = open_checkpoint(f"{s3_url}/checkpoint-6").read("model.model.norm.weight")
    assert torch.equal(found, tensors(model_config(), seed=6)["model.norm.weight"].bfloat16())


def test_failed_export_reports_the_commands_error(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "checkpoint-2").write_text("mine")
    outcomes: list[ExportOutcome] = []
    with _exporter(run, str(tmp_path), outcomes) as exporter:
        exporter.finish(2, is_stopped=_never)
        exporter.finish(99, is_stopped=_never)
    assert "exists already" in outcomes[0].problem
    assert "not committed" in outcomes[1].problem
    assert (tmp_path / "checkpoint-2").read_text() == "mine"
    assert "step 2: the export failed, training is not affected" in caplog.text
    assert "exported to" not in caplog.text


def test_the_log_tells_an_export_from_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(subprocess, "Popen", _NoProcess)
    outcomes: list[ExportOutcome] = []
    with Exporter(ExportConfig(every=1, url="out"), "run", outcomes.append) as exporter:
        exporter.poll(3)
        exporter.poll(None)
    assert "step 3: exported to out/checkpoint-3 in" in caplog.text
    caplog.clear()
    monkeypatch.setattr(_NoProcess, "returncode", 3)
    with Exporter(ExportConfig(every=1, url="out"), "run", outcomes.append) as exporter:
        exporter.poll(4)
        exporter.poll(None)
    assert "step 4: the export failed, training is not affected: exit code 3" in caplog.text
    assert [outcome.problem for outcome in outcomes] == ["", "exit code 3"]


class _NoProcess:
    """A command that ends at once."""

    returncode = 0

    def __init__(self, *_: object, **__: object) -> None:
        return None

    def poll(self) -> int:
        return self.returncode


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN], ids=["foreground", "background"])
def test_export_that_is_stopped_leaves_nothing(run: Path, tmp_path: Path, handler: signal.Handlers) -> None:
    outcomes: list[ExportOutcome] = []
    previous = signal.signal(signal.SIGINT, handler)  # a shell job started with `&` inherits SIG_IGN
    try:
        with _exporter(run, str(tmp_path), outcomes) as exporter:
            exporter.poll(2)
            assert exporter._running is not None
            shown = Path(f"/proc/{exporter._running.process.pid}/cmdline").read_bytes()
            assert str(tmp_path).encode() not in shown  # what every user of the machine may read
            assert str(run).encode() not in shown
    finally:
        signal.signal(signal.SIGINT, previous)
    assert [outcome.problem for outcome in outcomes] == ["stopped with training"]
    assert list(tmp_path.iterdir()) == []


def test_what_training_goes_on_from_is_exported_unless_it_was(run: Path, tmp_path: Path) -> None:
    """The export of the last step may have been stopped with training, which has nothing left to do then."""
    for left in ([7], []):
        outcomes: list[ExportOutcome] = []
        with _exporter(run, str(tmp_path), outcomes) as exporter:
            exporter.begin_from(7)
            exporter.poll(None)
            assert outcomes == []
            exporter.finish(None, is_stopped=_never)
        assert [outcome.step for outcome in outcomes] == left
    with _exporter(run, str(tmp_path), outcomes) as exporter:
        exporter.begin_from(6)
        exporter.poll(None)
        assert exporter.steps() == {6}


def test_nothing_is_begun_when_training_was_stopped(run: Path, tmp_path: Path) -> None:
    outcomes: list[ExportOutcome] = []
    with _exporter(run, str(tmp_path), outcomes) as exporter:
        exporter.finish(2, is_stopped=lambda: True)
    assert outcomes == []


def test_retention_leaves_what_is_being_exported(tmp_path: Path) -> None:
    in_use = {1}
    options = SaveOptions(retention=RetentionPolicy(keep_last=1), in_use=lambda: frozenset(in_use))
    with Saver(str(tmp_path), options) as saver:
        for step in (1, 2, 3):
            saver.save({"model": {"w": torch.zeros(2)}}, step=step).wait()
        assert [info.step for info in list_checkpoints(str(tmp_path))] == [1, 3]
        in_use.clear()
        saver.save({"model": {"w": torch.zeros(2)}}, step=4).wait()
    assert [info.step for info in list_checkpoints(str(tmp_path))] == [4]


def _train(tmp_path: Path, **values: Any) -> int:
    fixed = {
        "data.cache": str(tmp_path / "cache"), "data.source": DEBUG_CONFIG, "data.seq_len": 16, "save.url": str(tmp_path / "run"),
        "save.every": 2, "export.every": 2, "train.steps": 4, "log.tensorboard": False, "debug.recorder": False,
    } | values  # fmt: skip
    return main(["train", DEBUG_CONFIG, *(f"--set={key}={json.dumps(value)}" for key, value in fixed.items())])


def _exports(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "export"]


def test_training_leaves_a_model_of_its_last_checkpoint(tmp_path: Path) -> None:
    assert _train(tmp_path) == 0
    last = _exports(tmp_path / "run")[-1]
    assert (last["step"], last["problem"]) == (4, "")
    exported = open_checkpoint(str(tmp_path / "run" / "hf" / "checkpoint-4"))
    saved = open_checkpoint(str(tmp_path / "run"))
    name = "model.model.embed_tokens.weight"
    assert torch.equal(exported.read(name), saved.read(name))


def test_training_does_not_fail_with_its_exports(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for step in (2, 4):
        (tmp_path / "out" / f"checkpoint-{step}").write_text("a file in the way")
    assert _train(tmp_path, **{"export.url": str(tmp_path / "out")}) == 0
    assert all(record["problem"] for record in _exports(tmp_path / "run"))
    assert (tmp_path / "out" / "checkpoint-4").read_text() == "a file in the way"
    assert open_checkpoint(str(tmp_path / "run")).step == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"export.every": 3}, "export.every = 3 is not a multiple of save.every = 2"),
        ({"save.every": 0}, "only checkpoints that are saved can be exported"),
        ({"export.every": -1}, "export.every = -1: must be at least 0"),
        ({"export.dtype": "float8"}, "export.dtype"),
    ],
)
def test_intervals_that_cannot_work_are_refused(
    tmp_path: Path, values: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, **values) == 2
    assert message in capsys.readouterr().err
