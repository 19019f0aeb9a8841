"""The merged logs as data, and what is read again while a job is followed: no line is lost, nothing stays open."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_ckpt.errors import StoreError
from titan_ckpt.store import open_store
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data_content import LogFile, find_content
from titan_ckpt.tui.data_logs import LogFilter, LogIndex, cheap_mask, load_logs, search, visible
from titan_ckpt.tui.log_files import LogFiles
from titan_ckpt.tui.screen_logs import FOLD_LINES, LogsPane
from titan_ckpt.tui.screenshot import settled

STAMP = "2026-11-21 02:00:{:02d}.{:03d} [rank{}] INFO "


def line(second: int, rank: int, text: str) -> str:
    return STAMP.format(second, 0, rank) + text


def index_of(folder: Path, head_bytes: int | None = None) -> LogIndex:
    paths = sorted(path.name for path in folder.iterdir())
    files = tuple(LogFile(path=name, rank=i, size_bytes=(folder / name).stat().st_size) for i, name in enumerate(paths))
    return load_logs(LogFiles(open_store(str(folder)), files), head_bytes=head_bytes)


def found(index: LogIndex, pattern: str) -> list[str]:
    *_, (share, mask) = search(index, pattern, cheap_mask(index, LogFilter()))
    assert share == 1.0
    return [index.read(int(place)).text for place in visible(index, mask)]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_is_found_with_and_without_its_newline(tmp_path: Path, end: str) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "begin") + "\n" + line(2, 0, "the last word") + end)
    index = index_of(tmp_path)
    assert found(index, "last word") == [line(2, 0, "the last word")]
    assert found(index, "word$") == [line(2, 0, "the last word")]


def test_a_search_never_blames_the_last_indexed_line_for_what_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rank_0.log"
    path.write_text("".join(line(1, 0, f"number {n}") + "\n" for n in range(1000)) + line(2, 0, "needle") + "\n")
    assert found(index_of(tmp_path, head_bytes=4096), "needle") == []
    index = index_of(tmp_path)
    with path.open("a") as file:
        file.write(line(3, 0, "later") + "\n")
    assert found(index, "later") == []


@pytest.mark.parametrize("block_bytes", [64, 100, 1000])
def test_every_line_is_found_wherever_blocks_end(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_ckpt.tui.data_logs.BLOCK_BYTES", block_bytes)
    texts = [line(n % 60, 0, f"item {n} " + "x" * (n % 37 + 1)) for n in range(200)]
    (tmp_path / "rank_0.log").write_text("\n".join(texts))
    index = index_of(tmp_path)
    assert len(index) == 200
    for n in (0, 1, 57, 198, 199):
        assert found(index, rf"\bitem {n}\b") == [texts[n]]


def test_lines_of_packed_and_plain_logs_are_merged_by_time(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "a") + "\n" + line(3, 0, "c") + "\n")
    (tmp_path / "rank_1.log.gz").write_bytes(gzip.compress((line(2, 1, "b") + "\n" + line(4, 1, "d")).encode()))
    index = index_of(tmp_path)
    assert [index.read(int(place)).text[-1] for place in index.order] == ["a", "b", "c", "d"]
    assert index.place_of_time(index.first_ms + 1500, index.order) == 2
    index.files.close()


def test_closed_logs_say_so_instead_of_opening_again(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("x\n")
    index = index_of(tmp_path)
    index.files.close()
    with pytest.raises(StoreError, match="read again"):
        index.read(0)


def open_here(folder: Path) -> int:
    """How many descriptors of this process lie below a folder, or in a temporary folder of unpacked logs."""
    links = [
        os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{n}")
    ]
    return sum(link.startswith(str(folder)) or "titan-ckpt-logs-" in link for link in links)


async def test_following_reads_what_grows_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = tmp_path / "run"
    run.mkdir()
    (run / "rank_1.log.gz").write_bytes(gzip.compress((line(1, 1, "packed") + "\n").encode()))
    (run / "rank_0.log").write_text("")
    app = TitanApp(find_content(str(run)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        for n in range(5):
            with (run / "rank_0.log").open("a") as file:
                file.write(line(n, 0, f"word {n}") + "\n")
            app._loader.reload()
            await settled_when(app, pilot, lambda n=n: len(app.pane.body.rows) == n + 2)  # type: ignore[misc]
        assert open_here(tmp_path) == 2
        assert len(list(tmp_path.glob("titan-ckpt-logs-*"))) == 1
    assert open_here(tmp_path) == 0
    assert list(tmp_path.glob("titan-ckpt-logs-*")) == []


async def settled_when(app: TitanApp, pilot: object, condition: Callable[[], bool]) -> None:
    """Wait until what was asked for has come."""
    while not (condition() and app.is_settled):
        await settled(app, pilot)  # type: ignore[arg-type]


async def test_a_run_that_goes_away_is_said_and_what_was_read_stays(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "still here") + "\n")
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        (tmp_path / "rank_0.log").unlink()
        app._loader.reload()
        await settled_when(app, pilot, lambda: "not read again" in app._said)
        assert "neither a run nor an incident" in app._said
        assert len(app.pane.body.rows) == 1


async def test_folding_says_that_it_looks_at_the_last_lines_only(tmp_path: Path) -> None:
    lines = [line(n // 1000 % 60, 0, f"{'word' * (n % 7)}{n}") for n in range(FOLD_LINES + 10)]
    (tmp_path / "rank_0.log").write_text("\n".join(lines))
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "folded" not in app.pane.title()
        await pilot.press("z")
        await settled(app, pilot)
        assert isinstance(app.pane, LogsPane)
        assert f"folded: the last {FOLD_LINES:,} lines only" in app.pane.title()
        assert re.search(rf"of {FOLD_LINES + 10:,} lines", app.pane.title())


def test_an_empty_log_is_no_line(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("")
    index = index_of(tmp_path)
    assert len(index) == 0
    assert found(index, "x") == []
    assert index.order.dtype == np.int32
