"""The comparison with TRL's rows sees what differs; TRL itself is installed by `make chat` alone."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from titan_ckpt.trainer.data.chat_template import ChatTemplate, TemplateProblem
from tools.chat.real_templates import UNTOLD, Outcome, add
from tools.chat.trl_rows import IGNORED, Piece
from tools.chat.with_trl import _compare
from tools.environment import environment_with


def piece(ids: list[int], *, learned: int) -> Piece:
    """A row of which the ids from this number on are learned."""
    labels = [i if n >= learned else IGNORED for n, i in enumerate(ids)]
    return tuple(ids), (*labels[1:], IGNORED), tuple(range(len(ids)))


IDS = [5, 6, 7, 8, 9]


def test_equal_rows_differ_nowhere() -> None:
    found = _compare([piece(IDS, learned=3)] * 2, [piece(IDS, learned=3)] * 2, [[5, 6, 7]] * 2)
    assert (found.examples, found.tokens, found.different, found.changed) == (2, 10, 0, 0)


@pytest.mark.parametrize(
    "ours",
    [piece(IDS, learned=4), piece(IDS, learned=2), piece([5, 6, 7, 8, 1], learned=3), piece(IDS[:4], learned=3)],
)
def test_a_mask_id_or_length_that_differs_is_counted(ours: Piece) -> None:
    assert _compare([piece(IDS, learned=3)], [ours], [[5, 6, 7]]).different >= 1


def test_the_changed_end_of_a_prompt_is_counted_as_its_own() -> None:
    """The prompt alone ends with another id than in the row, so TRL learns from there."""
    found = _compare([piece(IDS, learned=2)], [piece(IDS, learned=3)], [[5, 6, 1]])
    assert (found.different, found.of_prompts, found.changed) == (0, 1, 1)
    late = _compare([piece(IDS, learned=1)], [piece(IDS, learned=3)], [[5, 6, 1]])
    assert (late.different, late.of_prompts) == (1, 1)


def test_of_a_pair_the_earlier_change_counts_for_both() -> None:
    other = [5, 6, 2, 8, 9]
    theirs, ours = [piece(IDS, learned=2), piece(other, learned=2)], [piece(IDS, learned=3), piece(other, learned=3)]
    assert _compare(theirs, ours, [[5, 6, 7]], per_prompt=2).different == 0
    assert _compare(theirs, ours, [[5, 6, 7]] * 2).different == 1


def test_an_environment_that_is_ready_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.environment.subprocess.run", lambda *_args, **_rest: pytest.fail("made again"))
    (tmp_path / "ready").touch()
    assert environment_with(["none"], tmp_path) == str(tmp_path / "bin" / "python")


def test_a_conversation_that_one_side_refuses_is_a_difference() -> None:
    template, outcome = ChatTemplate("{{ messages }}", {}, where="t", today=date(2024, 7, 26)), Outcome()
    row, other = ([1, 2], [0, 1]), ([1, 3], [0, 1])
    untold = TemplateProblem(f"the template writes the messages before answer 1 {UNTOLD}: ...")
    for theirs, mine in ((row, row), (row, other), (ValueError(), ValueError()), (row, untold), (row, ValueError())):
        add(outcome, theirs, mine, template)
    add(outcome, ValueError(), row, template)
    assert outcome == Outcome(compared=2, tokens=4, different=3, refused=1, untold=1)
