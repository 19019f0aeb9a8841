"""The merged log index, and logs that grow while a job is followed: no line is lost, no file stays open."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from titan_ckpt.errors import StoreError
from titan_ckpt.store.open import open_store
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import LogFile, find_content
from titan_ckpt.tui.data.logs.files import LogFiles
from titan_ckpt.tui.data.logs.filter import LogQuery, fold, views
from titan_ckpt.tui.data.logs.growth import grow
from titan_ckpt.tui.data.logs.index import LogFilter, LogIndex, cheap_mask, lines_by_time, load_logs, search
from titan_ckpt.tui.screens.logs import LogsPane
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
    return [index.read(int(place)).text for place in lines_by_time(index, mask)]


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_is_found_with_and_without_its_newline(tmp_path: Path, end: str) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "begin") + "\n" + line(2, 0, "the last word") + end)
    index = index_of(tmp_path)
    assert found(index, "last word") == [line(2, 0, "the last word")]
    assert found(index, "word$") == [line(2, 0, "the last word")]


def test_a_search_ignores_text_after_the_indexed_lines(tmp_path: Path) -> None:
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
    monkeypatch.setattr("titan_ckpt.tui.data.logs.index.BLOCK_BYTES", block_bytes)
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


def lines_of(index: LogIndex) -> list[tuple[int | None, str]]:
    return [(line.rank, line.text) for line in map(index.read, index.order.tolist())]


def logs_at(folder: Path) -> tuple[LogFile, ...]:
    return find_content(str(folder)).logs


def grown(index: LogIndex, folder: Path) -> LogIndex | None:
    return grow(index, index.files, logs_at(folder))


@pytest.mark.parametrize("seed", range(6))
def test_a_grown_index_equals_a_fresh_one(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(line(0, rank, "begin") + "\n")
    index = load_logs(LogFiles(open_store(str(tmp_path)), logs_at(tmp_path)))
    for turn in range(1, 6):
        for rank in random.permutation(3 + turn)[: int(random.integers(0, 4))].tolist():
            words = [line(int(random.integers(turn, turn + 20)), rank, f"word {turn}"), "  no time", "ERROR cut"]
            text = "\n".join(words[: int(random.integers(1, 4))]) + ("\n" if random.random() < 0.5 else "")
            with (tmp_path / f"rank_{rank}.log").open("a") as file:
                file.write(text)
        now = grown(index, tmp_path)
        assert now is not None
        anew = load_logs(LogFiles(open_store(str(tmp_path)), now.files.files))
        assert lines_of(now) == lines_of(anew)
        assert now.level.tolist() == anew.level.tolist()
        assert now.end.tolist() == anew.end.tolist()
        index = now


@pytest.mark.parametrize("text", ["", "word", "1 error", "error", "0,2"])
def test_an_incremental_search_finds_the_same_as_a_full_one(tmp_path: Path, text: str) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(line(rank, rank, "a word") + "\n" + line(5, rank, "cut wo"))
    query = LogQuery(text=text)
    index = load_logs(LogFiles(open_store(str(tmp_path)), logs_at(tmp_path)))
    *_, before = views(index, query, None)
    for rank in (0, 1, 3):
        with (tmp_path / f"rank_{rank}.log").open("a") as file:
            file.write("rd\n" + line(4, rank, "an ERROR word") + "\n" + line(7, rank, "nothing") + "\n")
    now = grown(index, tmp_path)
    assert now is not None
    *_, after = views(now, query, before)
    *_, anew = views(now, query, None)
    assert after.view.tolist() == anew.view.tolist()
    assert len(after.view) > len(before.view)


def test_only_new_bytes_of_grown_logs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}.log").write_text("".join(line(n % 60, rank, "word") + "\n" for n in range(5_000)))
    index = load_logs(LogFiles(open_store(str(tmp_path)), logs_at(tmp_path)))
    with (tmp_path / "rank_1.log").open("a") as file:
        file.write(line(59, 1, "the news") + "\n")
    reads: list[tuple[int, int]] = []
    whole = LogFiles.read

    def read(self: LogFiles, index: int, start: int, length: int) -> bytes:
        reads.append((index, length))
        return whole(self, index, start, length)

    monkeypatch.setattr(LogFiles, "read", read)
    now = grown(index, tmp_path)
    assert now is not None
    assert len(now) == 10_001
    assert {i for i, _ in reads} == {1}
    assert sum(n for _, n in reads) < 200


@pytest.mark.parametrize("change", ["shorter", "gone", "another", "packed"])
def test_logs_that_did_more_than_grow_need_a_full_reload(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rank_0.log"
    path.write_text(line(1, 0, "one") + "\n" + line(2, 0, "two") + "\n")
    (tmp_path / "rank_1.log").write_text(line(1, 1, "one") + "\n")
    (tmp_path / "rank_2.log.gz").write_bytes(gzip.compress(b"packed\n"))
    index = load_logs(LogFiles(open_store(str(tmp_path)), logs_at(tmp_path)))
    if change == "shorter":
        path.write_text(line(3, 0, "anew") + "\n")
    elif change == "gone":
        path.unlink()
    elif change == "another":
        path.write_text("x" * 500 + "\n")
    else:
        (tmp_path / "rank_2.log.gz").write_bytes(gzip.compress(b"packed\nonce more\n" * 50))
    assert grown(index, tmp_path) is None
    index.files.close()


def test_a_time_without_a_year_takes_it_from_other_lines(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "before") + "\n" + line(3, 0, "after") + "\n")
    (tmp_path / "launcher.log").write_text(
        "E1121 02:00:02.500000 71 api.py:1] failed\n  detail\n[rank0]:W1121 02:00:02.750000 71 api.py:2] closing\n"
    )
    index = load_logs(LogFiles(open_store(str(tmp_path)), logs_at(tmp_path)))
    assert [text.split()[-1] for _, text in lines_of(index)] == ["before", "failed", "detail", "closing", "after"]
    assert [index.read(int(place)).level for place in index.order] == [1, 3, 1, 2, 1]


def test_closed_logs_raise_instead_of_reopening(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("x\n")
    index = index_of(tmp_path)
    index.files.close()
    with pytest.raises(StoreError, match="reloaded"):
        index.read(0)


def open_here(folder: Path) -> int:
    """Number of open descriptors below a folder or in a temporary folder of unpacked logs."""
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
    """Wait until the condition holds and the app is settled."""
    while not (condition() and app.is_settled):
        await settled(app, pilot)  # type: ignore[arg-type]


async def test_a_run_that_vanishes_is_reported_and_its_lines_stay(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text(line(1, 0, "still here") + "\n")
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        (tmp_path / "rank_0.log").unlink()
        app._loader.reload()
        await settled_when(app, pilot, lambda: "not reloaded" in app._status_text)
        assert "neither a run nor an incident" in app._status_text
        tmp_path.rmdir()
        app._loader.reload()
        await settled_when(app, pilot, lambda: "is gone: shown is what was read before" in app._status_text)
        assert len(app.pane.body.rows) == 1


async def test_the_title_shows_that_only_the_last_lines_are_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titan_ckpt.tui.data.logs.filter.FOLD_LINES", 500)
    monkeypatch.setattr("titan_ckpt.tui.screens.logs.FOLD_LINES", 500)
    lines = [line(n // 1000 % 60, 0, f"{'word' * (n % 7)}{n}") for n in range(510)]
    (tmp_path / "rank_0.log").write_text("\n".join(lines))
    app = TitanApp(find_content(str(tmp_path)), first_screen=5)
    async with app.run_test(size=(140, 45)) as pilot:
        await settled(app, pilot)
        assert "folded" not in app.pane.title()
        await pilot.press("z")
        await settled(app, pilot)
        assert isinstance(app.pane, LogsPane)
        assert "folded: the last 500 lines only" in app.pane.title()
        assert re.search("of 510 lines", app.pane.title())


def test_an_empty_log_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("")
    index = index_of(tmp_path)
    assert len(index) == 0
    assert found(index, "x") == []
    assert index.order.dtype == np.int32


def folded(folder: Path, lines: dict[int, str]) -> list[tuple[str, tuple[int, ...]]]:
    for rank, text in lines.items():
        (folder / f"rank_{rank:05}.log").write_text(text)
    content = find_content(str(folder))
    index = load_logs(LogFiles(content.store, content.logs))
    view, ranks = fold(index, index.order)
    return [(index.read(int(place)).text, ranks.get(i, ())) for i, place in enumerate(view)]


def test_only_lines_that_say_the_same_are_folded(tmp_path: Path) -> None:
    """Another loss, another step or another awaited rank is another line; who wrote it and when are not."""
    line = "2026-11-21 07:46:5{rank},000 INFO [rank {rank} tp{rank}] "
    texts = ("starting at step 7", "loss 2.{rank}", "waits for rank 9{rank}")
    lines = {rank: "".join(f"{line}{text}\n".format(rank=rank) for text in texts) for rank in (0, 1)}
    lines_shown = folded(tmp_path, lines)
    assert [(text.rpartition("] ")[2], ranks) for text, ranks in lines_shown] == [
        ("starting at step 7", (0, 1)),
        ("loss 2.0", ()), ("waits for rank 90", ()), ("loss 2.1", ()), ("waits for rank 91", ()),
    ]  # fmt: skip


def test_a_line_that_one_rank_repeats_is_not_lost(tmp_path: Path) -> None:
    lines_shown = folded(tmp_path, dict.fromkeys((0, 1), "2026-11-21 07:46:50,000 retry\n" * 2))
    assert [ranks for _, ranks in lines_shown] == [(0, 1), (0, 1)]
