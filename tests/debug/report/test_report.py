"""The report: its JSON against the schema, exit codes, actions for launchers, places, times and commands."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from titan_ckpt.cli.main import main
from titan_ckpt.debug import Run, Verdict, cli, diagnose, open_run
from titan_ckpt.debug.cli import exit_code
from titan_ckpt.debug.incident.kinds import FlagKind, Subtype, VerdictKind
from titan_ckpt.debug.incident.records import Evidence, Flag
from titan_ckpt.debug.report.action import action_for
from titan_ckpt.debug.report.as_json import SCHEMA, report_json
from titan_ckpt.debug.report.text import report_text
from tools.paths import DATA, INCIDENTS

INJECTED = DATA / "injected"
CASES = sorted(path.name for path in INCIDENTS.iterdir() if path.is_dir())


def violations(value: Any, schema: dict[str, Any], at: str = "$") -> list[str]:
    """Where `value` breaks the part of JSON Schema that ours uses."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    if "type" in schema:
        allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(isinstance(value, kinds[kind]) for kind in allowed):
            return [f"{at}: {value!r} is no {allowed}"]
    found = []
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        found.append(f"{at}: {value!r}")
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        found += [f"{at}.{key}: missing" for key in schema["required"] if key not in value]
        found += [f"{at}.{key}: unknown" for key in value if key not in properties]
        found += [
            v
            for key, part in value.items()
            if key in properties
            for v in violations(part, properties[key], f"{at}.{key}")
        ]
    if isinstance(value, list):
        found += [v for i, part in enumerate(value) for v in violations(part, schema["items"], f"{at}[{i}]")]
    return found


@pytest.mark.parametrize("case", CASES)
def test_json_follows_its_schema(case: str) -> None:
    run = open_run(str(INCIDENTS / case))
    assert violations(json.loads(json.dumps(report_json(run, diagnose(run), 2e9))), SCHEMA) == []


def test_schema_refuses_what_it_does_not_describe() -> None:
    run = open_run(str(INCIDENTS / "skip"))
    report = json.loads(json.dumps(report_json(run, diagnose(run))))
    del report["verdicts"][0]["culprits"]
    report["action"]["action"] = "PANIC"
    assert violations(report, SCHEMA) == ["$.action.action: 'PANIC'", "$.verdicts[0].culprits: missing"]


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        ("HEALTHY", 0),
        ("SKIPPED_COLLECTIVE", 1),
        ("STRAGGLER", 1),
        ("INSUFFICIENT_DATA", 4),
        ("WAIT_CHAIN", 4),
        ("RUNNING", 5),
    ],
)
def test_exit_codes(verdict: str, code: int) -> None:
    assert exit_code(Verdict(verdict=VerdictKind(verdict))) == code


@pytest.fixture
def run() -> Run:
    run = open_run(str(INCIDENTS / "skip"))
    record = replace(run.ranks[2], host="node17", pid=9192, exit=None, heartbeat=None)
    return replace(run, ranks={**run.ranks, 2: record})


@pytest.mark.parametrize(
    ("verdict", "subtype", "action", "hosts"),
    [
        ("SKIPPED_COLLECTIVE", "", "STOP", ()),
        ("RANK_DIED", "python_exception", "STOP", ()),
        ("RANK_DIED", "signal", "RESTART", ()),
        ("STUCK_ON_CPU", "dataloader", "RESTART", ()),
        ("RANK_DIED", "device", "EXCLUDE", ("node17",)),
        ("RANK_DIED", "host", "EXCLUDE", ("node17",)),
        ("RANK_FROZEN", "", "EXCLUDE", ("node17",)),
        ("STARTED_NOT_COMPLETED", "", "EXCLUDE", ("node17",)),
        ("HEALTHY", "", "NONE", ()),
        ("RUNNING", "", "NONE", ()),
        ("INSUFFICIENT_DATA", "", "NONE", ()),
    ],
)
def test_actions(run: Run, verdict: str, subtype: str, action: str, hosts: tuple[str, ...]) -> None:
    top = Verdict(verdict=VerdictKind(verdict), subtype=Subtype(subtype), culprits=(2,), confidence=0.9)
    found = action_for(run, top)
    assert (found.action, found.hosts) == (action, hosts)


def test_a_lead_stops_and_excludes_nobody(run: Run) -> None:
    top = Verdict(verdict=VerdictKind.RANK_FROZEN, culprits=(2,), confidence=0.5)
    assert action_for(run, top).action == "RESTART"


def test_report_names_place_time_waits_and_command(run: Run) -> None:
    text = report_text(replace(run, launcher=None), diagnose(run), 2e9)
    assert "ssh node17 py-spy dump --pid 9192" in text
    assert "where: rank 2: host node17, pid 9192" in text
    assert "who waited in what:\n  - ranks 0, 1, 3: all_reduce #7 of group default_pg" in text
    assert " UTC, " in text
    assert " ago" in text


FORGED = "boom\nHEALTHY: no fault found\x1b]0;x\x07\u2028what to do:"


def test_no_text_of_the_evidence_makes_a_line_of_the_report(run: Run) -> None:
    flag = Flag(flag=FlagKind.DUMP_CORRUPT, text=FORGED)
    top = Verdict(
        verdict=VerdictKind.RANK_DIED, culprits=(2,), headline=FORGED, evidence=(Evidence(text=FORGED, source=FORGED),),
        next_steps=(FORGED,),
    )  # fmt: skip
    text = report_text(replace(run, incident=FORGED, flags=(flag,)), [top, top])
    starts = [line.strip() for line in text.splitlines()]
    assert not any(line.startswith(("HEALTHY", "what to do:")) and line != "what to do:" for line in starts)
    assert starts.count("what to do:") == 1
    assert "\x1b" not in text
    assert r"boom\nHEALTHY" in text


@pytest.mark.parametrize("host", ["node1; rm x", "$(id)", "a b"])
def test_host_in_a_command_is_quoted(run: Run, host: str) -> None:
    evil = replace(run, launcher=None, ranks={**run.ranks, 2: replace(run.ranks[2], host=host)})
    assert any(f"ssh '{host}' " in command for command in report_json(evil, diagnose(evil))["commands"])


def test_host_that_looks_like_an_option_is_no_command(run: Run) -> None:
    evil = replace(run, launcher=None, ranks={**run.ranks, 2: replace(run.ranks[2], host="-oProxyCommand=x")})
    assert report_json(evil, diagnose(evil))["commands"] == ["py-spy dump --pid 9192  # on the host of rank 2"]


def test_rank_without_a_known_process_is_still_looked_for(run: Run) -> None:
    lost = replace(run, launcher=None, ranks={**run.ranks, 2: replace(run.ranks[2], host="", pid=None)})
    [command] = report_json(lost, diagnose(lost))["commands"]
    assert command == "titan-ckpt debug collect --out stacks  # on each host of the job"


def test_suspects_are_named_as_such(run: Run) -> None:
    top = Verdict(verdict=VerdictKind.OP_MISMATCH, suspects=(0, 2), confidence=0.4, headline="x")
    assert "nobody is accused; suspects: ranks 0, 2" in report_text(run, [top])


def test_job_that_has_ended_is_not_dumped(run: Run) -> None:
    assert run.launcher is not None
    assert report_json(run, diagnose(run))["commands"] == []


@pytest.mark.parametrize(
    ("verdict", "subtype", "has_dmesg"),
    [("RANK_DIED", "signal", True), ("RANK_DIED", "python_exception", False), ("SKIPPED_COLLECTIVE", "", False)],
)
def test_kernel_log_is_asked_for_where_it_may_tell(run: Run, verdict: str, subtype: str, has_dmesg: bool) -> None:
    top = Verdict(verdict=VerdictKind(verdict), subtype=Subtype(subtype), culprits=(2,), confidence=0.9)
    assert any("dmesg" in command for command in report_json(run, [top])["commands"]) == has_dmesg


def test_last_sign_of_life_is_no_time_of_a_file(run: Run) -> None:
    later = {
        rank: replace(record, dumps=tuple(replace(dump, time_s=4e9) for dump in record.dumps))
        for rank, record in run.ranks.items()
    }
    assert report_json(replace(run, ranks=later), diagnose(run))["time"] == report_json(run, diagnose(run))["time"]


def test_dead_ranks_are_not_dumped(run: Run) -> None:
    gone = replace(run, ranks={**run.ranks, 2: replace(run.ranks[2], process_state="gone")})
    report = report_json(gone, diagnose(gone))
    assert not any("py-spy" in command for command in report["commands"])


def test_page_for_bots_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["debug", "--help"])
    assert "4 a fault, or perhaps one" in " ".join(capsys.readouterr().out.split())


def test_a_rank_that_was_starved_for_a_moment_is_not_accused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first look at a live job finds a stack of the C timer; at the second the watching thread runs again."""
    stuck, went_on = open_run(str(INJECTED / "gil_held")), open_run(str(DATA / "run"))
    innocent = next(found for rank, found in stuck.ranks.items() if rank not in diagnose(stuck)[0].culprits)
    assert innocent.heartbeat is not None
    ticks = replace(innocent, heartbeat=replace(innocent.heartbeat, alive_ns=time.time_ns()))
    looks = iter([replace(stuck, ranks={**stuck.ranks, innocent.rank: ticks}), went_on])
    monkeypatch.setattr(cli, "open_run", lambda *_, **__: next(looks))
    monkeypatch.setattr(cli, "SECOND_LOOK_S", 0.0)
    assert main(["debug", "live"]) == 0
    shown = capsys.readouterr()
    assert "looking again" in shown.err
    assert shown.out.startswith("HEALTHY")
