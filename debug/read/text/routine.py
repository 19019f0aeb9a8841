"""Which lines a program writes again and again, whatever words it has for a step. Bounded: a few shapes of lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum

from titan_ckpt.debug.read.text.messages import NO_DIGITS

STEP = re.compile(
    r"(?<!checkpoint )(?<!ckpt )\b(?:global_?)?(?:step(?:[ =:#-]{0,3}| {4,8})|iter(?:ation)?[ =:#]{1,10})(\d{1,9})\b",
    re.IGNORECASE,
)
BAR = re.compile(r"\b(\d{1,9})/\d{1,9} \[\d[\d:]{3,12}<")  # tqdm's: `3/1000 [00:03<10:00,  1.64it/s]`
# What trainers write when they are done: Lightning, Transformers' Trainer, Megatron-LM, and what programs say in their own words.
DONE = re.compile(
    r"(?:[Tt]raining|TRAINING|[Rr]un|[Jj]ob) (?:is |has |was )?(?:completed?|finished|done|ended successfully)\b"
    r"(?! with| on| at step| \(status: FAIL)|\b(?:[Ff]inished|[Cc]ompleted) training\b"
    r"|`Trainer\.fit` stopped: |'train_runtime': |^\s*\[exiting program at iteration "
)
OF_DONE = ("rain", "exiting", " done", "nished", "ompleted")  # one of them is in each line of DONE
MOST_SHAPES = 64
LEAST_TIMES = 2  # a line that came once is no habit
LEAST_NEW = 4  # times that a line has to come which had never come before
_COMPARED = 160  # characters of a line
_LEAVES = re.compile(r"(?i)stop|shut|clos|exit|clean|kill|terminat|finali|destroy|join|releas|abort|fail|error")


# A record of a logger that is no routine, whatever it says.
RECORD = re.compile(r"\b(?:WARN(?:ING)?|ERROR|EXCEPTION|CRITICAL|FATAL)\b")
# What a program says that goes on after an error, and how it says that it does not.
_TRIES_ON = re.compile(
    r"\bre-?try(?:ing)?\b|\btry(?:ing)? (?:it )?again\b|\battempt #?\d{1,6} ?(?:/|of) ?\d|\bfall(?:ing|s)? ?back\b"
    r"|\bre-?connect(?:ed|ing)?\b|\b(?:continuing|going on|carrying on) (?:with|without)\b|\brecover(?:ed|ing) from\b"
    r"|\b(?:us(?:ing|e)|skip(?:ping|ped)|taking) (?:the |this |that |a )?"
    r"(?:next|previous|last|cached?|local|default|backup|sample|batch|file|shard|record|it)\b",
    re.IGNORECASE,
)
_IN_VAIN = re.compile(
    r"\b(?:not|no more|never|cannot|can't|won't|exhausted|gave up|(?:restart|relaunch|resubmit|requeue)\w{0,4})\b",
    re.IGNORECASE,
)
SOON = 6  # lines after an error in which a program says that it goes on
LATER_S = 30.0  # between two records after an error: a process that ends of it has ended by then


class GoesOn(IntEnum):
    """Whether a line shows that the program goes on. SAYS: by its words, or the time of the record; PERHAPS: the line is of its
    routine, but may have been in a buffer when the program ended."""

    NO = 0
    SAYS = 1
    PERHAPS = 2
    SURELY = 3


CHILD = "child process "
_NOT_MAIN = re.compile(
    r"(?:Exception in thread (?P<of>[^\n]{1,100}?)|Thread (?P<name>[A-Za-z_][\w.-]{0,60})):?\s*$"
    r"|.{0,100}\b(?:Task|Future) exception was never retrieved"
)


_CHILD = re.compile(r"Process (?P<name>\w{0,20}Process-[\d:]{1,20}):\s*$")


def beside_main(text: str, *, is_launched: bool) -> str:
    """The thread, task or child process of the traceback that follows the line, whose end ends no rank; "" if it names none.
    A child is one of a rank that torchrun launched; other ranks may be processes of multiprocessing themselves.

    As CPython's threading, multiprocessing and asyncio write it, and wandb/sdk/internal/internal_util.py.
    """
    if is_launched and (child := _CHILD.match(text)) is not None:
        return f"{CHILD}{child['name']}"
    found = _NOT_MAIN.match(text)
    return "" if found is None else found["of"] or found["name"] or "an asyncio task"


@dataclass(slots=True)
class Routine:
    """How often lines came that are equal but for their numbers: in all, and since `mark` was last called."""

    counts: dict[str, int] = field(default_factory=dict)
    habits: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    since: dict[str, int] | None = None
    num_since: int = 0
    since_s: float | None = None

    def take(self, text: str, time_s: float | None, *, is_flushed: bool) -> GoesOn:
        """Count a line, and tell what it shows. `is_flushed`: its writer, a logger, held back nothing that it had written before,
        and `time_s` is when it wrote the line."""
        counted = GoesOn.NO if RECORD.search(text[:200]) else self._count(text, is_flushed=is_flushed)
        return counted or self._says(text[:300], time_s if is_flushed else None)

    def _says(self, text: str, time_s: float | None) -> GoesOn:
        """Whether the line, the first ones after the mark, says that the program goes on, or was logged too long after the mark
        for one that ends."""
        if self.since is None:
            return GoesOn.NO
        self.num_since += 1
        if self.num_since <= SOON and _TRIES_ON.search(text) and not _IN_VAIN.search(text):
            return GoesOn.SAYS
        if time_s is None:
            return GoesOn.NO
        self.since_s = time_s if self.since_s is None else self.since_s
        return GoesOn.SAYS if time_s - self.since_s >= LATER_S else GoesOn.NO

    def _count(self, text: str, *, is_flushed: bool) -> GoesOn:
        shape = text[:_COMPARED].translate(NO_DIGITS).translate(_NO_SIGNS)
        if shape not in self.counts and len(self.counts) >= MOST_SHAPES:
            self.counts = {kept: count for kept, count in self.counts.items() if count >= LEAST_TIMES}
        if shape in self.counts or len(self.counts) < MOST_SHAPES:
            self.counts[shape] = self.counts.get(shape, 0) + 1
        if is_flushed and self._has_come_often(shape, text):
            return GoesOn.SURELY
        return GoesOn.PERHAPS if shape in self.habits else GoesOn.NO

    def _has_come_often(self, shape: str, text: str) -> bool:
        """Whether a line with a number came again and again since the mark. What tells of an end may come once a part."""
        if self.since is None or not any(map(str.isdigit, text)) or _LEAVES.search(text):
            return False
        if shape in self.since or len(self.since) < MOST_SHAPES:
            self.since[shape] = self.since.get(shape, 0) + 1
        return self.since.get(shape, 0) >= (LEAST_TIMES if shape in self.known else LEAST_NEW)

    def mark(self) -> None:
        """Note the lines that came until now, and which of them most often: at least half as often as any."""
        least = max(LEAST_TIMES, max(self.counts.values(), default=0) / 2)
        self.habits = frozenset(shape for shape, count in self.counts.items() if count >= least)
        self.known, self.since, self.num_since, self.since_s = frozenset(self.counts), {}, 0, None


_NO_SIGNS = str.maketrans("", "", ".,+-% ")  # which numbers are written with: `1.2e-05`, `12,000`, a column's padding
