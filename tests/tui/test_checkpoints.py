"""The checkpoints screen: tiers, folders of runs, checkpoints of other programs, and unreachable stores."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.screen_pictures import press as press_now
from tests.support.screen_pictures import screen_text
from tests.support.screen_terminal import PseudoTerminal, opened, see
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import NotFoundError
from titan_ckpt.saving.saver import Saver
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.bars import VerdictBar
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.runs import load_others, load_steps
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.upkeep.copy import copy_checkpoint
from titan_ckpt.upkeep.pruning import prune
from titan_ckpt.upkeep.retention import RetentionPolicy
from tools.paths import DATA, INCIDENTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    with Saver(str(folder)) as saver:
        for step in (10, 20, 30, 40):
            saver.save({"model": {"w": torch.full((8, 4), float(step))}}, step=step)
    return folder


def configure(run: Path, url: str, mirror: str) -> None:
    (run / "logs").mkdir(parents=True, exist_ok=True)
    (run / "logs" / "config.json").write_text(json.dumps({"save": {"url": url, "mirror": mirror}}))


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    """`runs/a` with steps 20 to 40 and mirror `safe/a` with 10 to 30; `runs/b`; `c` without a commit; `notes` is no run."""
    a, mirror = tmp_path / "runs" / "a", tmp_path / "safe" / "a"
    shutil.copytree(saved, a)
    configure(a, "runs/a", "safe/a")
    for step in (10, 20, 30):
        copy_checkpoint(open_checkpoint(str(a), step=step), open_store(str(mirror)))
    shutil.rmtree(a / "step-00000010")
    shutil.copytree(saved / "step-00000010", tmp_path / "runs" / "b" / "step-00000010")
    (tmp_path / "runs" / "c" / "step-00000001").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


async def press(app: TitanApp, pilot: Pilot[None], keys: str) -> str:
    await settled(app, pilot)
    await press_now(app, pilot, keys)
    return screen_text(app)


async def answer(app: TitanApp, pilot: Pilot[None], key: str, text: str) -> str:
    await press(app, pilot, key)
    app.query_one("#prompt", Input).value = text
    return await press(app, pilot, "enter")


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


async def test_a_run_is_opened_from_a_folder_of_runs_and_left(runs: Path) -> None:
    app = TitanApp(find_content(str(runs)))
    async with app.run_test(size=(80, 24)) as pilot:
        listed = await press(app, pilot, "1")
        assert "a folder of runs: 3 runs" in listed
        listed = await press(app, pilot, "enter")
        assert [line.split()[:3] for line in lines_with(listed, "kB") + lines_with(listed, " B ")] == [
            ["▸", "a", "40"],
            ["b", "10", "128"],
        ]
        assert lines_with(listed, "c ", "none")
        assert "notes" not in listed
        assert "mirror up to step 30" in await press(app, pilot, "enter")
        assert "step 40 · mesh" in await press(app, pilot, "enter")
        assert "mirror up to step 30" in await press(app, pilot, "escape")
        assert "available data" in await press(app, pilot, "1")
        back = await press(app, pilot, "escape escape")
        assert lines_with(back, "▸ a")
        assert app.pane.number == 7
        for keys in ("enter enter escape escape", "j enter 5 escape", "enter v escape escape escape"):
            assert await press(
                app, pilot, keys
            )  # faster than the screens: a result may arrive after its screen is gone
        assert app.return_code is None


async def test_a_run_with_a_name_like_a_step_is_opened(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "runs" / "run@12")
    app = TitanApp(find_content(str(tmp_path / "runs")))
    async with app.run_test(size=(80, 24)) as pilot:
        assert lines_with(await press(app, pilot, "1 enter"), "run@12", "40")
        assert lines_with(await press(app, pilot, "enter"), "30", "committed")


async def test_runs_in_folders_of_folders_are_listed_and_opened(runs: Path) -> None:
    team = runs.parent / "team"
    shutil.copytree(runs / "b", team / "project" / "nested")
    shutil.copytree(runs / "b", team / "flat")
    (team / "project" / "nested" / "extra" / "step-00000001").mkdir(parents=True)
    (team / "project" / "notes" / "a" / "b" / "c" / "step-00000001").mkdir(parents=True)
    for place, names in ((team, ["flat", "project/nested"]), (team / "project", ["nested"])):
        app = TitanApp(find_content(str(place)))
        async with app.run_test(size=(80, 24)) as pilot:
            listed = await press(app, pilot, "7")
            assert [line.strip(" ▸").split()[0] for line in lines_with(listed, " 10 ")] == names
            assert ("1 deeper folder not looked at, such as project/notes/a/b" in listed) == (place == team)
            await press(app, pilot, " ".join(["j"] * (len(names) - 1) + ["enter"]))
            assert "step 10 · mesh" in await press(app, pilot, "enter")


@pytest.mark.parametrize("opened_at", ["runs/a", "safe/a", "elsewhere"])
def test_both_tiers_are_found_from_wherever_a_run_is_opened(
    opened_at: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = runs.parent
    monkeypatch.chdir("/")
    configure(top / "elsewhere", str(top / "runs/a"), str(top / "safe/a"))
    configure(runs / "a", str(top / "runs/a"), str(top / "safe/a"))
    for manifest in (top / "safe").rglob("manifest.json"):
        assert json.loads(manifest.read_text())["config"] == {}
    found = load_others(load_steps(open_store(str(top / opened_at))))
    tiers = {step.step: step.tiers for step in found.steps}
    if opened_at == "safe/a":  # the other tier is unknown: the trainer did not save these
        assert set(tiers.values()) == {""}
    else:
        assert tiers == {40: "fast", 30: "both", 20: "both", 10: "mirror"}


async def test_a_prefix_of_any_store_lists_its_runs_and_tiers(saved: Path, store_url: str) -> None:
    """On the disk, in memory, in a bucket: two runs, one of them with a mirror."""
    a, mirror = open_store(f"{store_url}/a"), open_store(f"{store_url}/safe/a")
    a.write("logs/config.json", [json.dumps({"save": {"url": a.url, "mirror": mirror.url}}).encode()])
    for step, targets in ((10, [a, mirror, open_store(f"{store_url}/b")]), (20, [a])):
        for target in targets:
            copy_checkpoint(open_checkpoint(str(saved), step=step), target)
    app = TitanApp(find_content(store_url))
    async with app.run_test(size=(80, 24)) as pilot:
        listed = await press(app, pilot, "g")
        assert lines_with(listed, "▸ a ", " 20 ")
        assert lines_with(listed, "  b ", " 10 ")
        steps = await press(app, pilot, "enter")
        assert lines_with(steps, "20  committed", "fast")
        assert lines_with(steps, "10  committed", "both")
        verified = await press(app, pilot, "j v")
        assert "step 10 in the fast tier: 0 problems" in verified
        assert "step 10 in the mirror tier: 0 problems" in verified


async def test_a_step_in_the_url_has_the_cursor(runs: Path) -> None:
    for url in (f"{runs}/a@20", f"{runs}/a/step-00000020"):
        app = TitanApp(find_content(url))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            assert lines_with(screen_text(app), "▸ ", "20  committed")


async def test_a_step_is_read_from_one_tier_and_verified_in_both(runs: Path) -> None:
    app = TitanApp(find_content(str(runs / "a")), first_screen=7)
    async with app.run_test(size=(140, 45)) as pilot:
        listed = await press(app, pilot, "G")
        for step, tier in ((40, "fast"), (30, "both"), (20, "both"), (10, "mirror")):
            assert lines_with(listed, f" {step}  committed", tier)
        assert "step 10 · mesh" in await press(app, pilot, "g j j j enter")
        (data,) = (runs.parent / "safe" / "a" / "step-00000020").rglob("*.distcp")
        data.write_bytes(data.read_bytes()[:-1] + b"!")
        verified = await press(app, pilot, "escape k v")
        assert "step 20 in the fast tier: 0 problems" in verified
        assert "step 20 in the mirror tier: 0 problems" not in verified
        planned = await answer(app, pilot, "escape p", "1")
        assert "fast: 2 of 3 steps would be deleted" in planned
        assert "mirror: 2 of 3 steps would be deleted" in planned
        planned = await answer(app, pilot, "escape p", "1 20")
        assert "--keep-last 1 --keep-every 20" in planned
        assert "not one or two numbers" in await answer(app, pilot, "escape p", "-1")


async def test_an_unreachable_mirror_is_listed_with_its_error(runs: Path) -> None:
    configure(runs / "a", "runs/a", "nonsense://nowhere/a")
    app = TitanApp(find_content(str(runs / "a")), first_screen=7)
    async with app.run_test(size=(80, 24)) as pilot:
        listed = await press(app, pilot, "G")
        assert len(lines_with(listed, "committed", "fast")) == 3
        assert lines_with(listed, "mirror: ")
        assert "nonsense" in listed


def test_retries_appear_on_the_status_line_only(runs: Path, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        configure(runs / "a", "runs/a", "s3://bucket/a")
        names = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        with opened("pty", runs / "a", tmp_path, **names) as terminal:
            assert isinstance(terminal, PseudoTerminal)
            screen = see(terminal, "cannot list")
            assert "WARNING" not in screen
            assert "cannot list" in screen.splitlines()[-1]
            terminal.press("7")
            assert "given up after" in see(terminal, "given up after")
            terminal.press("q")
            assert terminal.ended_with() == 0


async def test_foreign_checkpoints_are_listed_and_opened(tmp_path: Path) -> None:
    """A run as torchtitan writes it, and a single DCP folder."""
    for folder in ("run/step-5", "run/step-1200", "alone"):
        dcp.save({"model": {"w": torch.ones(6, 2)}}, checkpoint_id=str(tmp_path / folder), no_dist=True)
    for folder, step in (("run", 1200), ("alone", 0)):
        app = TitanApp(find_content(str(tmp_path / folder)), first_screen=7)
        async with app.run_test(size=(80, 24)) as pilot:
            assert lines_with(await press(app, pilot, "g"), f"{step}  foreign")
            assert "model.w" in await press(app, pilot, "enter")
            assert "1 1" not in await press(app, pilot, "enter")
            assert "each cell shows" in screen_text(app)
            assert f"step {step}: 0 problems" in await press(app, pilot, "escape v")


def test_the_hint_for_a_wrong_folder_names_folders_of_runs(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(NotFoundError, match="a folder of runs"):
        find_content(str(tmp_path))


def two_steps(folder: Path) -> Path:
    with Saver(str(folder)) as saver:
        for step in (10, 20):
            saver.save({"model": {"w": torch.full((8, 4), float(step))}}, step=step)
    return folder


def damage(step: Path, pattern: str) -> bytes:
    (file,) = step.rglob(pattern)
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    return before


def lines_of(text: str, step: int) -> list[str]:
    return [line for line in text.splitlines() if f" {step}  " in line or f"!{step:>8}  " in line]


async def test_a_step_found_damaged_by_verify_is_marked_in_the_list(tmp_path: Path) -> None:
    """In the list, its title, the saves beside it, the overview and the preview of prune; until it is verified as whole."""
    run = two_steps(tmp_path / "run")
    before = damage(run / "step-00000020", "*.distcp")
    app = TitanApp(find_content(str(run)), first_screen=7)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "20  committed" in screen_text(app)
        await press_now(app, pilot, "v")
        await press_now(app, pilot, "escape")
        listed = screen_text(app)
        assert "20  damaged" in listed
        assert "20  committed" not in listed
        assert "1 committed · 1 damaged" in listed
        assert "128 B" in lines_of(listed, 20)[0]
        await press_now(app, pilot, "p enter")
        assert "damaged: 20" in screen_text(app)
        await press_now(app, pilot, "1")
        assert "newest committed: step 10" in screen_text(app)
        app._loader.reload()
        await settled(app, pilot)
        await press_now(app, pilot, "7 escape")
        assert "20  damaged" in screen_text(app), "a new listing keeps what is known"
        next((run / "step-00000020").rglob("*.distcp")).write_bytes(before)
        await press_now(app, pilot, "v")
        await press_now(app, pilot, "escape")
        assert "2 committed" in screen_text(app)


@pytest.mark.parametrize("keys", ["", "j", "G"])
async def test_the_preview_of_prune_is_what_the_command_plans(tmp_path: Path, keys: str) -> None:
    """The newest usable step is kept, wherever the cursor has been."""
    run = two_steps(tmp_path / "run")
    next((run / "step-00000020").rglob("*.distcp")).unlink()
    app = TitanApp(find_content(str(run)), first_screen=7)
    async with app.run_test(size=(140, 45)) as pilot:
        await press(app, pilot, keys)
        planned = await answer(app, pilot, "p", "1")
        report = prune(str(run), RetentionPolicy(keep_last=1))
        assert report.steps == []
        assert "0 of 2 steps would be deleted, 0 B" in planned
        assert "counted as whole" not in planned


async def test_a_step_that_cannot_be_opened_is_marked_in_the_list(tmp_path: Path) -> None:
    run = two_steps(tmp_path / "run")
    damage(run / "step-00000020", "manifest.json")
    app = TitanApp(find_content(str(run)), first_screen=7)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "20  damaged" in screen_text(app)


@pytest.mark.parametrize("size", [(80, 24), (140, 45)])
async def test_a_step_without_its_data_is_damaged_unasked(tmp_path: Path, size: tuple[int, int]) -> None:
    """At any width: the step named as the newest can be resumed from."""
    run = two_steps(tmp_path / "run")
    next((run / "step-00000020").rglob("*.distcp")).unlink()
    app = TitanApp(find_content(str(run)), first_screen=1)
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        assert "newest committed: step 10" in screen_text(app)
        assert "20  damaged" in await press(app, pilot, "7")


async def test_damage_to_the_newest_step_is_noticed_by_a_later_look(tmp_path: Path) -> None:
    run = two_steps(tmp_path / "run")
    app = TitanApp(find_content(str(run)), first_screen=7)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "20  committed" in screen_text(app)
        os.truncate(next((run / "step-00000020").rglob("*.distcp")), 100)
        app._loader.reload()
        await settled(app, pilot)
        assert "20  damaged" in screen_text(app)


async def test_the_list_of_runs_tells_damage_and_what_ended_a_job(tmp_path: Path) -> None:
    hung, whole = tmp_path / "runs" / "hung", two_steps(tmp_path / "runs" / "whole")
    shutil.copytree(INCIDENTS / "skip", hung / "debug" / "20261121T020700Z")
    configure(hung, "runs/hung", "")
    next((whole / "step-00000020").rglob("*.distcp")).unlink()
    for run, end in ((hung, ""), (whole, '{"event": "end", "reason": "completed", "time_s": 2.0}\n')):
        (run / "metrics.jsonl").write_text(f'{{"event": "step", "step": 2, "loss": 1.5, "time_s": 1.0}}\n{end}')
    app = TitanApp(find_content(str(tmp_path / "runs")), first_screen=7)
    async with app.run_test(size=(120, 30)) as pilot:
        await settled(app, pilot)
        listed = screen_text(app)
        assert ["hung", "silent", "2", "1.5", "none"] in [line.split()[:5] for line in listed.splitlines()]
        assert "SKIPPED_COLLECTIVE: rank 2 skipped all_reduce #7" in listed
        assert any(line.split()[1:6] == ["whole", "completed", "2", "1.5", "10"] for line in listed.splitlines())
        assert lines_with(listed, "step-00000020/", "__0_0.distcp")


async def test_a_healthy_job_over_damaged_steps_is_no_calm_bar() -> None:
    app = TitanApp(find_content(str(DATA / "run")), first_screen=7)
    async with app.run_test(size=(120, 36)) as pilot:
        await settled(app, pilot)
        assert " HEALTHY · ended 2026-11-21 07:47:14 UTC · 1 damaged step" in screen_text(app)
        assert app.query_one(VerdictBar).has_class("warn")
        await press_now(app, pilot, "j")
        await press_now(app, pilot, "v")
        await press_now(app, pilot, "escape")
        assert str(DATA) not in screen_text(app)
