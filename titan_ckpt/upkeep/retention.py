"""Decide which checkpoints a retention policy deletes. Pure: the caller lists, checks and deletes.

Never deleted: the newest committed resumable checkpoint, pinned steps, model-only exports (deliverables, not history), and
damaged ones (a person should look at them). Uncommitted steps are deleted only on request, and only when they are so old that no
save can still be writing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from titan_ckpt.arguments import check_flag, check_number, check_type, check_whole
from titan_ckpt.checkpoint.kinds import CheckpointState
from titan_ckpt.checkpoint.open import CheckpointInfo
from titan_ckpt.errors import ConfigError, UsageError

PINS = "pins.txt"
DAY_S = 86_400.0
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_PIN = re.compile(r"0*[0-9]{1,16}")  # MAX_STEP has 16 digits
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Keep the newest `keep_last` resumable checkpoints, those whose step `keep_every` divides, and `pins`.

    With `is_incomplete`, steps without a commit go too, once they are `older_than_s` old.
    """

    keep_last: int
    keep_every: int | None = None
    pins: frozenset[int] = field(default_factory=frozenset)
    is_incomplete: bool = False
    older_than_s: float = DAY_S

    def __post_init__(self) -> None:
        try:
            check_whole(self.keep_last, "keep_last", at_least=1)
            if self.keep_every is not None:
                check_whole(self.keep_every, "keep_every", at_least=1)
            check_type(self.pins, "pins", frozenset, set, list, tuple, hint="a set of steps")
            for step in self.pins:
                check_whole(step, "a step in pins", at_least=0)
            check_flag(self.is_incomplete, "is_incomplete")
            check_number(self.older_than_s, "older_than_s", at_least=0)
        except UsageError as error:
            raise ConfigError(str(error)) from None
        object.__setattr__(self, "pins", frozenset(self.pins))


def prune(
    infos: Iterable[CheckpointInfo], policy: RetentionPolicy, *, ages_s: Mapping[int, float] | None = None
) -> list[CheckpointInfo]:
    """The checkpoints that `policy` would delete, oldest first; deletes nothing.

    `ages_s` maps uncommitted steps to their ages in seconds; a step that is not in it counts as new.
    """
    ordered = sorted(infos, key=lambda info: info.step)
    kept = kept_steps(ordered, policy)
    gone = [info for info in ordered if info.is_resumable and info.step not in kept]
    if policy.is_incomplete:
        ages = ages_s or {}
        partial = (info for info in ordered if info.state == CheckpointState.PARTIAL and info.step not in policy.pins)
        gone += [info for info in partial if ages.get(info.step, 0.0) > policy.older_than_s]
    return sorted(gone, key=lambda info: info.step)


def why_it_stays(store: object, info: CheckpointInfo) -> str:
    """Why a step stays that the policy would let go by the listing alone; `info` is what was found when it was opened."""
    if info.state == CheckpointState.DAMAGED:
        return f"{store}@{info.step}: damaged, so it is not deleted: {info.problem}"
    return f"{store}@{info.step}: whole, and kept in place of a newer step that is damaged"


def kept_steps(infos: Sequence[CheckpointInfo], policy: RetentionPolicy) -> set[int]:
    """Steps of the resumable checkpoints to keep."""
    resumable = sorted(info.step for info in infos if info.is_resumable)
    every = policy.keep_every
    return {
        *resumable[-policy.keep_last :],
        *(step for step in resumable if every is not None and step % every == 0),
        *(step for step in resumable if step in policy.pins),
    }


def parse_pins(text: str, *, where: str) -> frozenset[int]:
    """The steps in a pins file: one per line, `#` starts a comment. ConfigError for any other line.

    >>> sorted(parse_pins("1200  # the paper's\\n\\n40\\n", where="pins.txt"))
    [40, 1200]
    """
    steps = set()
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word and not _PIN.fullmatch(word):
            raise ConfigError(f"{where}, line {number}: {word[:100]!r} is not a step; write one number a line")
        if word:
            steps.add(int(word[-16:]))  # what is before that is zeros
    return frozenset(steps)


def parse_age(text: str) -> float:
    """Seconds in an age such as `36h`.

    >>> parse_age("90s"), parse_age("1.5h"), parse_age("7d")
    (90.0, 5400.0, 604800.0)
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not an age; write for example 90s, 30m, 36h, 7d or 2w")
    return float(match.group(1)) * _SECONDS[match.group(2)]
