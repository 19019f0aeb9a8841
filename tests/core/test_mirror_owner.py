"""A second tier belongs to one run: another run copies nothing there, the same run on another machine goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.errors import ConfigError, StoreError
from titan_ckpt.format.names import COMMIT, RUN_ID
from titan_ckpt.saving import second_tier
from titan_ckpt.saving.saver import SaveError, SaveOptions, Saver
from titan_ckpt.store.base import ObjectInfo
from titan_ckpt.store.local import FileStore
from titan_ckpt.upkeep.ownership import join_tiers
from tools.rank_pool import RankPool


def values(url: Path) -> dict[int, float]:
    """The value that each committed step holds."""
    steps = [info.step for info in list_checkpoints(str(url)) if info.state == "committed"]
    return {step: float(open_checkpoint(f"{url}@{step}").read("w")[0]) for step in steps}


def save(saver: Saver, step: int, value: float) -> None:
    saver.save({"w": torch.full((5,), value)}, step=step).wait()
    while saver._mirror is not None and saver._mirror.metrics().waiting:
        saver._mirror._thread.join(0.01)


def mirrored(fast: Path, safe: Path, *steps: int, value: float = 1) -> None:
    with Saver(str(fast), SaveOptions(mirror=str(safe))) as saver:
        for step in steps:
            save(saver, step, value)


def test_another_run_replaces_nothing_in_the_mirror(tmp_path: Path) -> None:
    safe = tmp_path / "safe"
    first = Saver(str(tmp_path / "fast1"), SaveOptions(mirror=str(safe)))
    for step in (1, 2, 3):
        save(first, step, 10)
    for steps in ((1, 2), (3,), (1, 2, 3, 4)):
        with pytest.raises(SaveError, match="checkpoints of another run"):
            mirrored(tmp_path / f"fast2{len(steps)}", safe, *steps, value=-1)
        assert values(safe) == {1: 10, 2: 10, 3: 10}
    save(first, 4, 10)
    first.close()
    assert values(safe) == dict.fromkeys((1, 2, 3, 4), 10)


def test_an_empty_folder_is_not_taken_for_the_tier_a_run_had(tmp_path: Path) -> None:
    """Such as a disk that is not mounted: what is copied there is hidden by the next mount, and gone from the first tier."""
    fast, safe = tmp_path / "fast", tmp_path / "safe"
    mirrored(fast, safe, 1, 2)
    safe.rename(tmp_path / "elsewhere")
    safe.mkdir()
    with pytest.raises(SaveError, match="is not mounted"):
        mirrored(fast, safe, 3)
    assert not values(safe)
    assert values(fast) == {1: 1, 2: 1, 3: 1}
    (safe / RUN_ID).write_bytes((fast / RUN_ID).read_bytes())  # as the error says
    mirrored(fast, safe, 4)
    assert values(safe) == {2: 1, 3: 1, 4: 1}


def test_a_run_with_an_id_of_its_own_is_refused(tmp_path: Path) -> None:
    mirrored(tmp_path / "fast1", tmp_path / "safe1", 1)
    mirrored(tmp_path / "fast2", tmp_path / "safe2", 1)
    with pytest.raises(SaveError, match=f"its {RUN_ID} names another run"):
        mirrored(tmp_path / "fast2", tmp_path / "safe1", 5, value=-1)
    assert values(tmp_path / "safe1") == {1: 1}


def test_the_run_goes_on_from_another_machine(tmp_path: Path) -> None:
    safe = tmp_path / "safe"
    mirrored(tmp_path / "fast1", safe, 1, 2)
    mirrored(tmp_path / "fast2", safe, 3, 4, value=2)
    mirrored(tmp_path / "fast1", safe, 5)
    assert values(safe) == {1: 1, 2: 1, 3: 2, 4: 2, 5: 1}


def test_a_rollback_on_another_machine_needs_the_same_id(tmp_path: Path) -> None:
    fast, safe = tmp_path / "fast2", tmp_path / "safe"
    mirrored(tmp_path / "fast1", safe, 1, 2)
    with pytest.raises(SaveError, match="write the same line into"):
        mirrored(fast, safe, 2, value=2)
    (fast / RUN_ID).write_bytes((safe / RUN_ID).read_bytes())
    mirrored(fast, safe, 2, value=3)
    assert values(safe) == {1: 1, 2: 3}


@pytest.mark.parametrize("lost", ["fast", "safe", "both"])
def test_tiers_without_an_id_are_known_by_their_steps(tmp_path: Path, lost: str) -> None:
    fast, safe = tmp_path / "fast", tmp_path / "safe"
    mirrored(fast, safe, 1, 2)
    with Saver(str(fast)) as saver:
        save(saver, 3, 1)
    for name in ("fast", "safe") if lost == "both" else (lost,):
        (tmp_path / name / RUN_ID).unlink()
    mirrored(fast, safe, 4)
    assert values(safe) == dict.fromkeys((1, 2, 3, 4), 1)
    assert (fast / RUN_ID).read_bytes() == (safe / RUN_ID).read_bytes()


def test_a_job_whose_successor_mirrors_commits_no_more(tmp_path: Path) -> None:
    safe = tmp_path / "safe"
    first = Saver(str(tmp_path / "fast1"), SaveOptions(mirror=str(safe)))
    save(first, 1, 1)
    mirrored(tmp_path / "fast2", safe, 2, value=2)
    save(first, 2, 1)
    with pytest.raises(SaveError, match="took this run over"):
        first.check()
    first.close()
    assert values(safe) == {1: 1, 2: 2}


@pytest.mark.parametrize("text", ["", "# only a comment\n", "a\nb\n"])
def test_an_id_that_is_not_one_line_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_ID).write_text(text)
    with pytest.raises(ConfigError, match="expected one line"):
        join_tiers(FileStore(str(tmp_path)), FileStore(str(tmp_path / "other")))


def _mirror_is_refused(rank: int, folder: str, how: str) -> tuple[str, list[str]]:
    """The coordinator cannot join the second tier, then it can."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            owner, name = (second_tier, "join_tiers") if how == "join" else (second_tier.Mirror, "_refusal")
            patch.setattr(owner, name, _full_disk)
        saver = Saver(f"{folder}/run", SaveOptions(timeout_s=60, mirror=f"{folder}/mirror"))
        saver.save({f"w{rank}": torch.arange(8.0)}, step=1).wait()
        assert saver._mirror is not None
        while saver._mirror.metrics().waiting:
            saver._mirror._thread.join(0.01)
        with pytest.raises(SaveError) as raised:
            saver.check()
        dist.barrier()
        copied = [path.name for path in Path(folder).glob("mirror/step-*/*")]
        dist.barrier()
    saver.save({f"w{rank}": torch.arange(8.0)}, step=2).wait()
    saver.close()
    return str(raised.value), copied


@pytest.mark.dist
@pytest.mark.parametrize("how", ["join", "bug"])
def test_no_rank_copies_to_a_second_tier_that_is_refused(tmp_path: Path, how: str) -> None:
    with RankPool(2) as pool:
        answers = pool.run(_mirror_is_refused, str(tmp_path), how)
    for text, copied in answers:
        assert text.startswith("mirroring step 1 to")
        assert "failed on rank 0: StoreError: no room" in text
        assert copied == []
    assert [info.step for info in list_checkpoints(f"{tmp_path}/mirror") if info.state == "committed"] == [1, 2]


def _full_disk(*_: Any) -> Any:
    raise StoreError("no room")


def test_an_unreadable_step_is_said_while_the_tiers_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Saver(str(tmp_path / "fast")) as saver:
        save(saver, 1, 1)
    stat = FileStore.stat

    def refuses(self: FileStore, path: str) -> ObjectInfo:
        if path.endswith(COMMIT):
            raise StoreError("refused for now")
        return stat(self, path)

    monkeypatch.setattr(FileStore, "stat", refuses)
    join_tiers(FileStore(str(tmp_path / "fast")), FileStore(str(tmp_path / "safe")))
    assert f"{tmp_path / 'fast'}@1 is left for the next save: refused for now" in caplog.text
