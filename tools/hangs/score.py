"""What `debug` makes of a piece of evidence, held against the truth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.errors import TitanError
from tools.hangs.incident import Incident

UNDECIDED = frozenset({"INSUFFICIENT_DATA", "RUNNING"})
WELL = frozenset({"HEALTHY", "RUNNING", "STRAGGLER"})


class Outcome(StrEnum):
    """How a verdict compares with the truth; `kind`: the ranks are right, the verdict is not; `part`: some of the ranks."""

    RIGHT = "right"
    KIND = "kind"
    PART = "part"
    UNDECIDED = "undecided"
    ACCUSED = "ACCUSED"
    HEALTHY = "HEALTHY?"
    REFUSED = "REFUSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The outcome for one form of evidence; `has_line` is whether a line at fault is named, None where there is none."""

    name: str
    form: str
    outcome: Outcome
    has_line: bool | None
    told: str


def score(incident: Incident, form: str, folder: Path) -> Score:
    """Diagnose `folder` and compare."""
    try:
        top = diagnose(open_run(str(folder)))[0]
    except TitanError as error:
        return Score(name=incident.name, form=form, outcome=Outcome.REFUSED, has_line=None, told=str(error)[:150])
    told = f"{top.verdict}/{top.subtype} {list(top.culprits)} {top.confidence:.2f} {top.headline}"
    return Score(
        name=incident.name, form=form, outcome=outcome(incident, top), has_line=has_line(incident, top), told=told
    )


def outcome(incident: Incident, top: Verdict) -> Outcome:
    """The first verdict against the truth."""
    accused = set(top.culprits)
    if incident.is_healthy:
        if accused and top.verdict not in WELL:
            return Outcome.ACCUSED
        return Outcome.RIGHT if top.verdict in incident.kinds else Outcome.UNDECIDED
    if top.verdict == "HEALTHY":
        return Outcome.HEALTHY
    if top.verdict in UNDECIDED or not accused:
        return Outcome.RIGHT if not incident.culprits and top.verdict in incident.kinds else Outcome.UNDECIDED
    if accused == incident.culprits or (incident.any_of and accused <= incident.culprits):
        return Outcome.RIGHT if top.verdict in incident.kinds else Outcome.KIND
    return Outcome.ACCUSED if accused - incident.culprits else Outcome.PART


def has_line(incident: Incident, top: Verdict) -> bool | None:
    """Whether a line at fault is in the verdict's fields, headline or evidence."""
    if not incident.lines:
        return None
    texts = [top.headline, *(item.text for item in top.evidence)]
    named = {int(line) for text in texts for line in re.findall(r"programs_\w+\.py:(\d+)", text)}
    named |= {item.line for item in top.evidence if item.line} | {top.line}
    return bool(named & incident.lines)
