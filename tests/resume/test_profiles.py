"""Profiles in cycles of steps, in the run's store too, and the snapshot of an accelerator whose memory runs out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training_runs import train
from titan_ckpt.trainer.report import profile as profiles
from titan_ckpt.trainer.report.logs import RunFolder
from titan_ckpt.trainer.report.profile import Cycle, Inspection


def test_each_cycle_leaves_a_profile_in_the_store_too(cache: str, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "folder"
    cyclic = ("log.profile_every=3", "log.profile_active=2", f"log.folder={folder}", "log.progress=false")
    assert train(cache, run, *cyclic, "train.steps=4") == 0
    assert train(cache, run, *cyclic, "train.steps=8") == 0
    names = [f"profile_00000_{step:08d}.json" for step in (3, 6, 8)]  # the last one is of a cycle that was cut short
    for place in (run, folder):
        assert sorted(path.name for path in (place / "logs").glob("profile*")) == names
    events = json.loads((run / "logs" / names[1]).read_text())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    assert len(steps) == 2
    assert any(event.get("name") == "aten::silu" for event in events)


def test_a_cycle_has_warmup_and_active_steps() -> None:
    names = [Cycle(every=5, active=2, warmup=1).action(step).name for step in range(1, 8)]
    assert names == ["NONE", "NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE", "NONE", "NONE"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("log.profile_every=2", "log.profile_active=2"), "fewer steps than profile_warmup 1 + profile_active 2"),
        (("log.profile_every=4", "log.profile_steps=[1, 2]"), "there is one profiler; give one of the two"),
        (("log.profile_every=4", "log.profile_active=0"), "log.profile_active = 0: must be at least 1"),
        (("log.memory_dump=true",), "log.memory_dump: snapshots are of an accelerator's memory; this run is on cpu"),
    ],
)
def test_profiles_that_cannot_be_are_refused(
    cache: str, tmp_path: Path, sets: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(cache, tmp_path, *sets) == 2
    assert said in capsys.readouterr().err


def _inspection(tmp_path: Path, uploaded: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Inspection:
    """One of an accelerator, with CUDA's allocator replaced by a file of its name."""

    def write(path: str, *, keep_recording: bool) -> None:
        Path(path).write_text(str(keep_recording))

    monkeypatch.setattr(profiles, "record_memory", lambda: uploaded("recording"))
    monkeypatch.setattr(profiles, "write_memory", write)
    (tmp_path / "logs").mkdir()
    asked: dict[str, Any] = {"memory_dump": True, "memory_steps": (1, 1)}
    return Inspection(folder=RunFolder(str(tmp_path)), rank=3, device=torch.device("cuda"), upload=uploaded, **asked)


def _run_out_of_memory(inspection: Inspection) -> None:
    with inspection.watching():
        inspection.before(1)
        inspection.after(1)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_leaves_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    inspection = _inspection(tmp_path, seen.append, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        _run_out_of_memory(inspection)
    names = ["memory_00003.pickle", "memory_00003_oom.pickle"]
    assert seen == ["recording", "recording", *names]
    assert [(tmp_path / "logs" / name).read_text() for name in names] == ["True", "True"]


def test_other_errors_leave_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    with pytest.raises(KeyError), _inspection(tmp_path, seen.append, monkeypatch).watching():
        raise KeyError("other")
    assert seen == ["recording"]
