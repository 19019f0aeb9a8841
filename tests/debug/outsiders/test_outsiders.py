"""`debug` on the evidence of outsiders: nobody innocent is accused, no hang is well, and a changed verdict is seen."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.debug.outsiders.pieces import outcome, pinned, told, unpack
from titan_ckpt.debug import Verdict, diagnose, open_run

Judged = dict[str, tuple[list[Verdict], dict[str, Any], str]]
LEAST_RIGHT = {"outsiders/first": 455, "outsiders/second": 218}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("pieces")
    found = {}
    for name, (path, truth) in unpack(folder).items():
        verdicts = diagnose(open_run(str(path)))
        found[name] = (verdicts, truth, told(verdicts).replace(str(folder), "."))
    return found


@pytest.mark.parametrize("name", LEAST_RIGHT)
def test_outsiders_truths(name: str, judged: Judged) -> None:
    found = {
        piece: outcome(verdicts[0], truth)
        for piece, (verdicts, truth, _) in judged.items()
        if piece.startswith(name + "/")
    }
    wrong = {piece: what for piece, what in found.items() if what != "right"}
    counts = Counter(found.values())
    assert counts["accused"] == counts["healthy"] == 0, wrong
    assert counts["right"] >= LEAST_RIGHT[name], wrong


def test_verdicts_are_those_pinned(judged: Judged) -> None:
    """A wanted change: look at each difference, then `python -m tests.debug.outsiders.pieces`."""
    expected = pinned()
    assert set(judged) == set(expected)
    changed = {name: (expected[name], text) for name, (_, _, text) in judged.items() if text != expected[name]}
    shown = "\n".join(f"{name}\n- {was}\n+ {now}" for name, (was, now) in list(changed.items())[:5])
    assert not changed, f"{len(changed)} pieces:\n{shown}"
