"""Hosts, units and containers that turn out to be one rank each, by what their own lines say."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug.incident.records import Verdict

Entry = tuple[str, str]  # host and message
STEP = "rank {rank}/{size} step {step} loss 2.1"


def top(folder: Path, name: str, text: str) -> Verdict:
    (folder / name).write_text(text)
    return first_verdict(folder)


def steps(ranks: Iterable[int], size: int, form: str = STEP, host: str = "m{rank}x") -> list[Entry]:
    numbers = [*ranks]
    return [
        (host.format(rank=rank), form.format(rank=rank, size=size, step=step)) for step in range(4) for rank in numbers
    ]


def errors(host: str, text: str) -> list[Entry]:
    return [(host, line) for line in text.splitlines()]


def documents(entries: list[Entry]) -> str:
    """As Cloud Logging gives them, newest first: each line of the standard error is an entry of level ERROR."""
    found = [
        {
            "jsonPayload": {"message": text, "levelname": "INFO" if "step" in text else "ERROR"},
            "resource": {"labels": {"task_name": host}}, "timestamp": f"2026-03-03T16:00:{place // 4:02d}Z",
        }
        for place, (host, text) in enumerate(entries)
    ]  # fmt: skip
    return json.dumps(found[::-1])


def journal(entries: list[Entry]) -> str:
    return "".join(
        json.dumps(
            {
                "__REALTIME_TIMESTAMP": f"17725536{place:02d}000000",
                "_SYSTEMD_UNIT": unit,
                "_HOSTNAME": "lab",
                "MESSAGE": text,
            }
        )
        + "\n"
        for place, (unit, text) in enumerate(entries)
    )


def test_host_whose_lines_name_one_rank_is_that_rank(tmp_path: Path) -> None:
    entries = [*steps(range(3), 3), *errors("m2x", OWN), *errors("m0x", PEER), *errors("m1x", PEER)]
    found = top(tmp_path, "downloaded.json", documents(entries))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (2,))


SEVERAL = {
    "two ranks on each host": [*steps((0, 1), 4, host="a-0"), *steps((2, 3), 4, host="a-1"), *errors("a-1", OWN)],
    "the first rank of each host alone": [*steps((0,), 8, host="a-0"), *steps((4,), 8, host="a-1"), *errors("a-1", OWN)],
    "one host alone": [*steps((0,), 4, host="a-1"), *errors("a-1", OWN)],
    "what a host says of another's rank": [
        *steps((0, 2), 3), ("pool-9", "rank 1 did not respond"), *errors("pool-9", OWN),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL)
def test_host_that_may_hold_other_ranks_is_none(tmp_path: Path, name: str) -> None:
    assert top(tmp_path, "log.json", documents(SEVERAL[name])).culprits == ()


@pytest.mark.parametrize("label", ["rank={} ", "[rank {}] ", "rank {}/4 "])
def test_entry_of_several_lines_is_of_the_rank_it_begins_with(tmp_path: Path, label: str) -> None:
    rows = [(f"i-{rank}", f"{label.format(rank)}step={step}") for step in range(4) for rank in range(4)]
    rows += [(f"i-{rank}", label.format(rank) + (OWN if rank == 2 else PEER)) for rank in (2, 0, 1, 3)]
    table = io.StringIO()
    csv.writer(table).writerows(
        [("Date", "Host", "Content"), *((f"2026-03-03T16:00:{n:02d}Z", *row) for n, row in enumerate(rows))]
    )
    found = top(tmp_path, "extract.csv", table.getvalue())
    assert (found.verdict, found.culprits) == ("RANK_DIED", (2,))


UNITS = steps(range(4), 4, host="train@{rank}.service")
LOST = [(f"train@{rank}.service", PEER.splitlines()[-1]) for rank in (0, 1, 2)]


@pytest.mark.parametrize(
    "said",
    ["A process of this unit has been killed by the OOM killer.", "Main process exited, code=killed, status=9/KILL"],
)
def test_unit_that_systemd_saw_killed_is_its_rank(tmp_path: Path, said: str) -> None:
    found = top(tmp_path, "journal.json", journal([*UNITS, ("init.scope", f"train@3.service: {said}"), *LOST]))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (3,))


@pytest.mark.parametrize(
    "said",
    [
        "train@3.service: Main process exited, code=killed, status=15/TERM",
        "train.service: Failed with result 'oom-kill'.",
    ],
)
def test_unit_that_was_stopped_or_is_no_rank_is_not_accused(tmp_path: Path, said: str) -> None:
    assert top(tmp_path, "journal.json", journal([*UNITS, ("init.scope", said)])).culprits == ()


def compose(names: tuple[str, ...], guilty: str) -> str:
    lines = [(name, f"step {step} loss 2.1") for step in range(3) for name in names]
    lines += [pair for name in names for pair in errors(name, OWN if name == guilty else PEER)]
    return "".join(f"{name}  | {line}\n" for name, line in lines)


def test_services_of_compose_with_a_number_are_ranks(tmp_path: Path) -> None:
    found = top(tmp_path, "compose.log", compose(("trainer0-1", "trainer1-1", "trainer2-1"), "trainer1-1"))
    assert (found.verdict, found.culprits) == ("RANK_DIED", (1,))


@pytest.mark.parametrize("names", [("gpu1-1", "gpu2-1", "gpu3-1"), ("a0-1", "b1-1"), ("t0-1", "t2-1")])
def test_other_services_of_compose_are_no_ranks(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert top(tmp_path, "compose.log", compose(names, names[-1])).culprits == ()
