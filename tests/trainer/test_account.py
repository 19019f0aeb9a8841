"""Reports of a finished run: goodput across restarts, trace, plot; and the pre-tokenise command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.trainer.data.token_files import open_tokens
from titan_ckpt.trainer.report.goodput import goodput
from titan_ckpt.trainer.report.phases import Phases, trace_events
from titan_ckpt.trainer.report.plot import draw_svg, nice_ticks, run_panels
from titan_ckpt.trainer.report.records import MetricsRecord, parse_records
from tools.paths import DEBUG_CONFIG

QUICK = ("train.steps=2", "train.device=cpu", "log.tensorboard=false", "log.progress=false", "debug.recorder=false")


def _step(step: int, time_s: float, **fields: Any) -> MetricsRecord:
    numbers = {
        "step_s": 1.0,
        "data_wait_s": 0.25,
        "loss": 5.0 - step / 10,
        "tokens_per_s": 100.0,
        "committed_step": None,
    }
    return {"event": "step", "step": step, "time_s": time_s, **numbers, **fields}


def _interrupted() -> list[MetricsRecord]:
    """Steps 1 to 4 with a save at 2; a crash after 4; 10 s later a resume from 2 runs to 5."""
    return [
        {"event": "start", "launched_s": 100.0, "time_s": 103.0, "step": 0},
        _step(1, 104.0),
        _step(2, 105.0),
        {"event": "save", "step": 2, "time_s": 105.5, "stall_s": 0.5},
        _step(3, 106.5, committed_step=2),
        _step(4, 107.5, committed_step=2),
        {"event": "start", "launched_s": 117.5, "time_s": 118.5, "step": 2},
        _step(3, 119.5),
        _step(4, 120.5),
        {"event": "validation", "step": 4, "loss": 4.4, "time_s": 121.5, "seconds": 1.0},
        _step(5, 122.5),
    ]


def test_goodput_books_every_second_of_an_interrupted_run_once() -> None:
    account = goodput(_interrupted())
    assert (account.attempts, account.recomputed_steps, account.total_s) == (2, 2, 22.5)
    assert account.productive_s == 5 * 0.75
    assert account.data_wait_s == 5 * 0.25
    assert (account.recomputed_s, account.downtime_s, account.startup_s) == (2.0, 10.0, 4.0)
    assert (account.stall_s, account.validation_s) == (0.5, 1.0)
    assert account.other_s == pytest.approx(0.0)
    assert "2 recomputed steps 2.0 s" in account.text()


def test_a_new_run_in_the_folder_of_another_counts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for text in QUICK for word in ("--set", text)]
    for _ in range(2):
        assert main(["train", DEBUG_CONFIG, *words]) == 0
    saved = [*words, "--set", "save.url=runs/saved", "--set", "save.every=1"]
    assert main(["train", DEBUG_CONFIG, *saved]) == 0
    assert main(["train", DEBUG_CONFIG, *saved, "--set", "train.steps=3"]) == 0
    found = {name: Path("runs", name, "logs", "metrics.jsonl").read_text() for name in ("unsaved", "saved")}
    attempts = {name: goodput(parse_records(text)).attempts for name, text in found.items()}
    assert attempts == {"unsaved": 1, "saved": 2}
    assert found["unsaved"].count('"event": "start"') == 2
    assert goodput(parse_records(found["unsaved"])).recomputed_steps == 0


def test_uninterrupted_run_has_no_restart_losses() -> None:
    account = goodput(_interrupted()[:6])
    assert (account.attempts, account.recomputed_s, account.downtime_s) == (1, 0.0, 0.0)


def test_a_line_that_a_crash_cut_short_is_left_out() -> None:
    whole = json.dumps(_step(1, 2.0))
    assert [record["step"] for record in parse_records(f"{whole}\n{whole[:20]}")] == [1]


def test_phases_add_up_and_only_chosen_steps_are_traced() -> None:
    phases = Phases(steps=range(2, 3))
    for step in (1, 2, 3):
        with phases("data", step), phases("inner", step):
            pass
    assert set(phases.take()) == {"data", "inner"}
    assert phases.take() == {}
    assert [(span.name, span.step) for span in phases.spans] == [("inner", 2), ("data", 2)]


def test_other_threads_phases_are_traced_but_not_recorded() -> None:
    hooked: list[str] = []

    class Hook:
        def __init__(self, name: str, _step: int) -> None:
            hooked.append(name)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    phases = Phases(hook=Hook, steps=range(1, 2))

    def upload() -> None:
        with phases("ckpt_upload", 1):
            pass

    thread = threading.Thread(target=upload, name="upload")
    with phases("forward_backward", 1):
        thread.start()
        thread.join()
    assert hooked == ["forward_backward"]
    events = trace_events(phases.spans, rank=3, name="rank 3")
    assert {(e["name"], e["pid"]) for e in events if e["ph"] == "X"} == {("ckpt_upload", 3), ("forward_backward", 3)}
    assert len({e["tid"] for e in events if e["ph"] == "X"}) == 2


def test_the_plot_is_an_svg_with_a_curve_per_number() -> None:
    text = draw_svg("run <1>", "goodput", run_panels(_interrupted()))
    root = ElementTree.fromstring(text)
    shapes = [element.tag.partition("}")[2] for element in root.iter()]
    assert shapes.count("polyline") == 3
    assert shapes.count("circle") == 2
    assert "run &lt;1&gt;" in text


@pytest.mark.parametrize(("low", "high"), [(0.0, 60.0), (2.97, 5.87), (0.0, 1e-7), (1234.0, 98765.0), (5.0, 5.0)])
def test_ticks_enclose_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 7


def test_plot_writes_the_picture_and_the_account_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.jsonl").write_text("\n".join(map(json.dumps, _interrupted())))
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "run.svg"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recomputed_steps"] == 2
    assert (tmp_path / "run.svg").read_text().startswith("<svg")
    code = "import sys, titan_ckpt.trainer.report.plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_plot_of_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path)]) == 3
    assert "that `titan-ckpt train` wrote" in capsys.readouterr().err


def test_output_that_is_not_named_svg_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "run.png")]) == 2
    assert "the picture is an SVG" in capsys.readouterr().err
    assert not (tmp_path / "run.png").exists()


def test_pretokenised_corpus_has_the_sample_order_of_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    sets = ["--set", f"data.source={tmp_path}/a.jsonl"]
    assert main(["train", DEBUG_CONFIG, *sets, "--pretokenise", str(tmp_path / "tokens")]) == 0
    assert "8 tokens of 2 documents" in capsys.readouterr().out
    assert open_tokens(str(tmp_path / "tokens")).read(0, 8).tolist() == [*b"one", 256, *b"two", 256]
