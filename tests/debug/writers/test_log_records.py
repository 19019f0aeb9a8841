"""`logging.exception` writes its prefix before the message alone: the plain traceback below is the same rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict

STEPS = "".join(
    f"2026-09-14 03:00:0{step},{rank}58 [rank {rank}] INFO step {step}\n" for step in range(4) for rank in range(4)
)
CHAINED = f"{OWN}\nDuring handling of the above exception, another one:\n\n{OWN.replace('KeyError', 'LookupError')}"


def record(rank: int, text: str, below: str = "", *, level: str = "ERROR", second: int = 5) -> str:
    return f"2026-09-14 03:00:0{second},901 [rank {rank}] {level} {text}\n{below}"


def culprits(folder: Path, text: str) -> tuple[int, ...]:
    (folder / "all.log").write_text(STEPS + text)
    return first_verdict(folder).culprits


@pytest.mark.parametrize("order", [(3, 0, 1), (0, 1, 3)], ids=str)
@pytest.mark.parametrize("own", [OWN, CHAINED], ids=["alone", "chained"])
def test_plain_traceback_is_of_the_record_before(tmp_path: Path, order: tuple[int, ...], own: str) -> None:
    text = "".join(record(rank, "step failed", own if rank == 3 else PEER) for rank in order)
    assert culprits(tmp_path, text) == (3,)


@pytest.mark.parametrize(
    "before",
    [
        record(0, "step 4", level="INFO"),
        record(0, "the loader is slow", level="WARNING"),
        record(0, "Connection closed by peer [10.1.2.3]:40012"),
        record(0, "lost the dashboard, trying again") + record(0, "lost the dashboard"),
        record(0, "lost the dashboard") + "2026-09-14 03:00:05,902 saving\n",
        record(0, "step failed", PEER),
    ],
)
def test_traceback_behind_another_line_is_nobodys(tmp_path: Path, before: str) -> None:
    assert culprits(tmp_path, before + OWN) == ()


def test_logged_traceback_that_was_outlived_accuses_nobody(tmp_path: Path) -> None:
    later = "".join(record(rank, "step 5", level="INFO", second=7) for rank in range(4))
    assert culprits(tmp_path, record(2, "bad sample", OWN) + later) == ()
