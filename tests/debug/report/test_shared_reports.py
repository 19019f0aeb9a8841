"""Reports to pass on: the HTML page, the trace for Perfetto, Markdown; and the flags of `titan-ckpt debug` that write them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulated_jobs import random_scenario, write
from titan_ckpt.cli.main import main
from titan_ckpt.debug import Run, Verdict, diagnose, open_run
from titan_ckpt.debug.diagnosis.rank_state import situations
from titan_ckpt.debug.incident.records import COMPLETED, Evidence
from titan_ckpt.debug.report import trace
from titan_ckpt.debug.report.facts import stack_of
from titan_ckpt.debug.report.html_page import report_html
from titan_ckpt.debug.report.markdown import report_markdown
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.errors import AlreadyExistsError, UsageError
from tools.paths import DATA, INCIDENTS

INJECTED = DATA / "injected"
NOW_S = 1.8e9
HOSTILE = '<script>alert(1)</script> & "quoted" \x1b[31m <!-- --> `x` |a|\n# no heading, see #7 of @user'


class _Page(HTMLParser):
    """Tags with their attributes, and the text of the page; an error for a tag that is closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page_of(run: Run, verdicts: Sequence[Verdict]) -> _Page:
    page = _Page(report_html(run, verdicts, situations(run), NOW_S))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {name for _, found in page.tags for name in found} & {"src", "href", "onload", "onclick", "style"}
    return page


@pytest.mark.parametrize("case", ["extra_collective", "p2p_batch", "segfault", "user_code", "init_hang"])
def test_the_page_shows_verdict_culprit_stack_and_log(case: str) -> None:
    run = open_run(str(INJECTED / case))
    verdicts = diagnose(run)
    page = page_of(run, verdicts)
    text = "".join(page.words)
    assert verdicts[0].headline in text
    assert all(step in text for step in verdicts[0].next_steps)
    marked = [found for tag, found in page.tags if tag == "tr" and found.get("class") == "culprit"]
    assert len(marked) == len(verdicts[0].culprits)
    first = run.ranks[verdicts[0].culprits[0]]
    assert f"rank {first.rank}" in text
    if first.log is not None:
        assert first.log.tail[-1].strip() in text
    if (found := stack_of(first)) is not None:
        assert found[1].frames[0].place in text
    assert (found is not None) == bool(first.stacks)


def test_the_page_and_markdown_obey_nothing_that_they_quote() -> None:
    run = open_run(str(INJECTED / "extra_collective"))
    top = replace(diagnose(run)[0], headline=HOSTILE, evidence=(Evidence(text=HOSTILE, rank=1, source=HOSTILE),))
    page = page_of(run, [top])
    assert "<script>alert(1)</script>" in "".join(page.words)
    assert "\x1b" not in "".join(page.words)
    assert len([tag for tag, _ in page.tags if tag == "h1"]) == 1
    lines = report_markdown(run, [top], NOW_S).splitlines()
    quoted = [line for line in lines if "alert" in line]
    assert len(quoted) == 2
    assert all(
        r"\<script\>" in line and r"\|a\|" in line and "#7" not in line and "@user" not in line for line in quoted
    )
    assert not any(line.startswith("# ") for line in lines)


def test_a_secret_of_a_log_is_not_on_the_page() -> None:
    run = open_run(str(INJECTED / "extra_collective"))
    top = replace(diagnose(run)[0], headline="connect to s3 with aws_secret_access_key=abcd1234efgh5678ijkl failed")
    assert "abcd1234efgh5678ijkl" not in "".join(page_of(run, [top]).words)


def test_the_page_of_1024_ranks_is_below_two_megabytes(tmp_path: Path) -> None:
    scenario = next(s for seed in range(100) if (s := random_scenario(seed, (1024,))).fault != "none")
    write(scenario, tmp_path)
    run = open_run(str(tmp_path))
    verdicts = diagnose(run)
    page = report_html(run, verdicts, situations(run), NOW_S)
    assert verdicts[0].culprits == scenario.truth[1]
    assert 50_000 < len(page.encode()) < 2_000_000
    text = "".join(_Page(page).words)
    assert all(f"rank {rank}" in text for rank in verdicts[0].culprits)


def events_of(run: Run) -> list[dict[str, Any]]:
    found = json.loads("".join(trace.trace_parts(run, diagnose(run)[0], mark="ours")))
    assert found["otherData"]["written_by"] == "ours"
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


@pytest.mark.parametrize("case", ["extra_collective", "p2p_batch", "p2p_cycle"])
def test_the_trace_has_every_operation_once_and_in_tracks(case: str) -> None:
    run = open_run(str(INJECTED / case))
    events = events_of(run)
    operations = [event for event in events if event["ph"] == "X"]
    assert len(operations) == sum(len(record.operations) for record in run.ranks.values())
    pending = sum(
        int((~r.operations["retired"] & (r.operations["state"] != COMPLETED)).sum()) for r in run.ranks.values()
    )
    assert len([event for event in operations if event["cat"] == "pending"]) == pending > 0
    tracks: dict[tuple[int, int], float] = {}
    for event in operations:
        track = event["pid"], event["tid"]
        assert event["ts"] >= tracks.get(track, 0.0) - 1.0  # µs: the shortest event that is drawn
        tracks[track] = event["ts"] + event["dur"]
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(tracks)
    assert {event["pid"] for event in events if event["name"] == "process_name"} == {pid for pid, _ in tracks}


def test_reports_of_a_slow_job_say_nothing_of_a_hang(tmp_path: Path) -> None:
    """Of its first dumps, in which the last operation was open: those in JSON are newer."""
    shutil.copytree(INCIDENTS / "straggler", tmp_path / "of", ignore=shutil.ignore_patterns("*.json"))
    run = open_run(str(tmp_path / "of"))
    verdicts = diagnose(run)
    text, page = report_text(run, verdicts, NOW_S), report_html(run, verdicts, situations(run), NOW_S)
    for report in (text, page):
        assert "ended well 2026-11-21 02:15:43 UTC" in report
        assert "waited for" in report
        for word in ("last sign of life", "waits for", "wait for rank", "did not end", "begins to wait"):
            assert word not in report, word
    still_open = [event for event in events_of(run) if event.get("cat") == "open"]
    assert [event["pid"] for event in still_open] == [0, 2, 3]
    assert {event["name"] for event in still_open} == {"all_reduce #19 (open when it was recorded)"}
    assert not any("cname" in event for event in still_open)


def test_a_trace_that_would_be_too_large_says_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(str(INJECTED / "extra_collective"))
    monkeypatch.setattr(trace, "MOST_EVENTS", 5 * len(run.ranks))
    whole = sum(len(record.operations) for record in run.ranks.values())
    kept = [event for event in events_of(run) if event["ph"] == "X"]
    assert trace.num_left_out(run) == whole - len(kept) > 0
    assert {event["pid"] for event in kept if event["cat"] == "pending"} == set(run.ranks)


def test_debug_writes_page_trace_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, traced = tmp_path / "report.html", tmp_path / "trace.json"
    words = [str(INJECTED / "extra_collective"), "--html", str(page), "--perfetto", str(traced), "--markdown"]
    assert main(["debug", *words]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("### SKIPPED_COLLECTIVE (extra_collective): rank 1 issued an extra all_gather")
    assert re.search(r"wrote .*report\.html\n.*wrote .*trace\.json; open it in ui\.perfetto\.dev", err)
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(traced.read_text())["traceEvents"]
    assert main(["debug", *words]) == 1  # our own files are replaced
    page.write_text("mine")
    assert main(["debug", *words]) == AlreadyExistsError.exit_code
    assert page.read_text() == "mine"
    assert main(["debug", *words, "--force"]) == 1
    assert page.read_text() != "mine"


def test_debug_all_writes_no_single_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["debug", str(INJECTED), "--all", "--html", str(tmp_path / "a.html")])
    assert code == UsageError.exit_code
    assert "one incident's folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--html", "--perfetto"])
def test_no_report_replaces_a_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    """A command line with the wrong name in it must not cost a checkpoint; --force is for files of the user."""
    for name in ("COMMIT.json", "OWNER.json", ".metadata", "manifest.json"):
        (tmp_path / name).write_text("a run's")
        assert main(["debug", str(INJECTED / "skip"), option, str(tmp_path / name), "--force"]) == 2
        assert f"keeps a file of the name {name} in a run" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == "a run's"
    data = tmp_path / "step-00000005" / "a-20260101T000000Z-00000000" / "__0_0.distcp"
    data.parent.mkdir(parents=True)
    data.write_text("a run's")
    assert main(["debug", str(INJECTED / "skip"), option, str(data), "--force"]) == 2
    assert "is in the folder of a checkpoint" in capsys.readouterr().err
    assert data.read_text() == "a run's"
    assert main(["debug", str(INJECTED / "skip"), option, ""]) == 2
    assert "the name of the file to write is empty" in capsys.readouterr().err
