"""What a file tells of errors that ended nobody: the job went on, another log is quoted, or a test run passed."""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from titan_ckpt.debug.incident.kinds import EventKind
from titan_ckpt.debug.incident.records import LogEvent
from titan_ckpt.debug.read.text.endings import Endings
from titan_ckpt.debug.read.text.streams import Stream

SEVERAL = 2  # steps
MOST_STEPS = 100_000
MOST_AFTER = 40  # lines that may follow a test run's last word
# `> [rank4]: ...` and `INFO  resume: > [rank6]: ...`: another log's lines.
_QUOTE = re.compile(r"(?:[A-Z]{4,8}:? +)?(?:[\w./-]{1,60}: ){0,2}>(?: |$)")
# A comment, and code in a sentence that names a rank: both speak of a log.
_MENTION = re.compile(r"# (?! *[Rr]ank +\d)[^`]*\brank[ _]?\d|[^`]*`[^`]{0,200}\brank[ _]?\d{1,6}\b[^`]{0,400}`")
# pytest's last line, and `go test`'s: https://pkg.go.dev/cmd/go#hdr-Test_packages
_PASSED = re.compile(r"^=+ \d+ passed(?:, \d+ (?:skipped|xfailed|xpassed|warnings?|deselected))* in [\d.]+s\b|^PASS$")

_CRASHES = (EventKind.FATAL_SIGNAL, EventKind.KILLED)
_NO_FILES = ("<string>", "<stdin>")
# glog's prefix: torch writes such lines while a process ends.
_BY_TORCH = re.compile(r"\W{0,4}(?:rank\d+\]:?)?\W{0,3}[WEFI]\d{4} ")


@dataclass(slots=True)
class Caught:
    """Of one file. `has_quotes`: lines behind `>` are no quotes in it, as most are. `passed_line`: where all tests had passed.
    `steps`: the lines at which the job came to a new step, and these. `timed`: line, time and rank of steps;
    `numbered`: line, number and rank of steps."""

    has_quotes: bool = True
    passed_line: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)
    timed: list[tuple[int, float, int]] = field(default_factory=list)
    numbered: list[tuple[int, int, int]] = field(default_factory=list)

    def look_at(self, texts: Sequence[str]) -> None:
        """Judge by the beginning of the file what `>` is."""
        self.has_quotes = 2 * sum(_QUOTE.match(text) is not None for text in texts) > len(texts)

    def is_quote(self, number: int, text: str) -> bool:
        """Whether a line is another log's; notes the last word of a test run."""
        if "pass" in text.lower() and _PASSED.search(text):
            self.passed_line = number
        is_mention = ("`" in text or text.startswith("# ")) and _MENTION.match(text) is not None
        return is_mention or (not self.has_quotes and _QUOTE.match(text) is not None)

    def is_test_run(self, num_lines: int, faults: Iterable[int]) -> bool:
        """Whether the file is what a test run wrote that passed: then faults, at lines before its end, are its subject."""
        is_last = self.passed_line > 0 and num_lines - self.passed_line <= MOST_AFTER
        return is_last and max(faults, default=0) < self.passed_line

    def note_step(self, number: int, stream: Stream) -> None:
        """Note whether the line brought the job to a new step; some lines about a step have no number."""
        if stream.last_step_line == number and stream.time_s is not None and len(self.timed) < MOST_STEPS:
            self.timed.append((number, stream.time_s, stream.rank))
        if stream.last_step_line == number and stream.last_step is not None and len(self.numbered) < MOST_STEPS:
            self.numbered.append((number, stream.last_step, stream.rank))
        if stream.last_step_line == number and len(self.steps) < MOST_STEPS:
            newest = self.steps[-1][1] if self.steps else -1
            step = newest + 1 if stream.last_step is None else stream.last_step
            if step > newest:
                self.steps.append((number, step))

    def has_gone_on(self, line: int) -> bool:
        """Whether the job came to steps before a line, and to several new ones after it."""
        return bool(self.steps) and self.steps[0][0] < line and sum(at > line for at, _ in self.steps) > SEVERAL

    def _went_on(self, line: int, rank: int, done_line: int) -> bool:
        """Whether a rank that says no times came to several new steps after a line, and either had come to some before or then
        said that it is done: so these were not held back, nor of a file that stands below. Where no step has a rank, whether
        as many as before came to each."""
        mine = [(at, step) for at, step, of in self.numbered if of == rank]
        before, after = (Counter(s for at, s, _ in self.numbered if (at > line) is late) for late in (False, True))
        if not mine:
            usual = max(before.values(), default=0)
            return usual > 1 and sum(count >= usual for step, count in after.items() if step >= max(before)) > SEVERAL
        later = [step for at, step in mine if at > line]
        is_between = len(before) > 0 and len(later) < len(mine) and later[:1] >= [max(before)]
        return len(later) > SEVERAL and (is_between or done_line > line)

    def _drop_outlived(self, streams: Sequence[Stream], endings: Endings) -> None:
        """Drop the ends of processes after which the rank of that number came to several more steps: another program's, which the
        job had started, or an earlier attempt's. (What a rank held back and wrote late is of an earlier time.)"""
        done = {stream.rank: stream.done_line for stream in streams}
        lines, newest_s = [line for line, _, _ in self.timed], [0.0]
        newest_s.extend(itertools.accumulate((time_s for _, time_s, _ in self.timed), max))
        of_rank: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        for line, time_s, rank in self.timed:
            of_rank[rank].append((line, time_s))

        def is_outlived(line: int, rank: int) -> bool:
            if not lines:
                return self._went_on(line, rank, done.get(rank, 0))
            since_s, found = newest_s[bisect.bisect_left(lines, line)], of_rank.get(rank, [])
            return sum(time_s > since_s for _, time_s in found[bisect.bisect_left(found, (line, 0.0)) :]) > SEVERAL

        ranks = [ending.local_rank if ending.rank is None else ending.rank for ending in endings.found]
        endings.found = [
            ending
            for ending, rank in zip(endings.found, ranks, strict=True)
            if rank is None or not is_outlived(ending.line, rank)
        ]
        endings.notes = [
            note
            for note in endings.notes
            if not (task := note.values.get("task", "")).isdigit() or not is_outlived(note.line, int(task))
        ]

    def _stepped_around(self, line: int, rank: int) -> bool:
        """Whether a rank logged steps before a line, and several after it: a process that crashes loses what it held back."""
        mine = [at for at, _, of in self.numbered if of == rank]
        return bool(mine) and mine[0] < line and sum(at > line for at in mine) > SEVERAL

    def mark(self, streams: Iterable[Stream], endings: Endings) -> None:
        """Drop the ends of processes that the job outlived. Mark the exceptions and crashes before which the job came to several
        steps, and after which it came to more; and exceptions of code that was passed as text, after which the writer went on: a
        sample of a code benchmark failed."""
        streams = [*streams]
        self._drop_outlived(streams, endings)
        lines = [line for line, _ in self.steps]
        for stream, events in ((each, events) for each in streams for events in (each.first, each.last)):
            for place, event in enumerate(events):
                before = bisect.bisect_left(lines, event.line)
                has_steps = before >= SEVERAL and len(lines) - before > SEVERAL
                if event.kind in _CRASHES:  # of a child, if its rank came to several steps, too
                    is_outlived = has_steps and self._stepped_around(event.line, stream.rank)
                else:
                    is_outlived = event.kind == EventKind.EXCEPTION and (has_steps or _is_of_text(event, stream))
                if is_outlived:
                    events[place] = replace(event, values={**event.values, "went_on": "1"})


def _is_of_text(event: LogEvent, stream: Stream) -> bool:
    """Whether all calls of a traceback are in `exec` of a text or `python -c`, and ordinary lines of its writer follow."""
    is_text = bool(event.calls) and all(frame.file in _NO_FILES for frame in event.calls)
    return is_text and any(number > event.line and not _BY_TORCH.match(text) for number, text in stream.tail)


def mark(stream: Stream, name: str, after: int) -> None:
    """Give the events of a stream after a line a value of that name."""
    for events in (stream.first, stream.last):
        for place, event in enumerate(events):
            if event.line > after:
                events[place] = replace(event, values={**event.values, name: "1"})


def wrote_after(streams: Iterable[Stream], line: int) -> bool:
    """Whether anything was written after a line."""
    return any(stream.tail and stream.tail[-1][0] > line for stream in streams)


def forget(stream: Stream, until: int) -> None:
    """Drop what a stream holds up to a line, of an earlier attempt of the job."""
    if not stream.tail or stream.tail[-1][0] <= until:
        stream.restart()
        return
    stream.first[:] = [event for event in stream.first if event.line > until]
    for kept in (stream.last, stream.open_errors):
        later = [event for event in kept if event.line > until]
        kept.clear()
        kept.extend(later)
    if stream.last_step_line <= until:
        stream.last_step, stream.last_step_line = None, 0
        stream.step_times.clear()
