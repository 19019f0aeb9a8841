"""A rank whose peers lost their connections to it: whether it died, ended or left its process group. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from signal import SIGTERM

from titan_ckpt.debug.diagnosis.rank_death import signal_of
from titan_ckpt.debug.incident.kinds import Subtype, VerdictKind
from titan_ckpt.debug.incident.records import RankRecord, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How a rank was lost; `text` continues a sentence that begins with the rank."""

    verdict: VerdictKind
    text: str
    subtype: Subtype = Subtype.NONE


def loss_of(run: Run, record: RankRecord) -> Loss:
    """How the rank was lost, by its exit and by what a launcher lists of the others."""
    if record.exit is None and any(other.exit for other in run.ranks.values()):
        return Loss(
            verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.FINISHED_EARLY,
            text="ended while the others waited for it: their connections to it closed, and no failure of it is listed",
        )  # fmt: skip
    if heeded_sigterm(record):
        return Loss(
            verdict=VerdictKind.SKIPPED_COLLECTIVE, subtype=Subtype.FINISHED_EARLY,
            text="left its process group while the others waited for it: their connections to it closed, and it ended only "
            "when its launcher told it to",
        )  # fmt: skip
    gone = "is gone: its peers' connections to it were closed"
    if ended_first(run, record) and record.exit is not None:
        text = f"{gone}; it ended first, with exit code {record.exit.code}"
        return Loss(verdict=VerdictKind.RANK_DIED, subtype=Subtype.EXIT_CODE, text=text)
    return Loss(verdict=VerdictKind.RANK_DIED, text=gone)


def heeded_sigterm(record: RankRecord) -> bool:
    """Whether SIGTERM ended it, which a process that does not run never hears."""
    return record.exit is not None and record.exit.was_told and signal_of(record.exit.code) == SIGTERM


def ended_first(run: Run, record: RankRecord) -> bool:
    """Whether a rank ended by itself, with an error code, before all others."""
    ended = record.exit
    if ended is None or ended.code <= 0 or ended.was_told or signal_of(ended.code):
        return False
    times = [other.exit.time_s for other in run.ranks.values() if other.exit and other.exit.time_s is not None]
    return ended.is_first or (ended.time_s is not None and ended.time_s == min(times))
