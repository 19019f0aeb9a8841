"""A report as Markdown, for an issue tracker or a chat: the facts as lists, the stacks of the ranks at fault folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from titan_ckpt.console.escapes import escape_line
from titan_ckpt.debug.incident.contradictions import num_ranks
from titan_ckpt.debug.incident.frames import program_frames
from titan_ckpt.debug.incident.records import Run, Verdict
from titan_ckpt.debug.report.facts import (
    commands,
    fact,
    lasting,
    page_of,
    stack_of,
    step_text,
    waiting,
    where,
    who_waits,
)

MOST_STACKS, MOST_FRAMES = 4, 40
# What Markdown obeys; an underscore inside a word is plain. `#7` and `@name` would become links of the issue tracker.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~]|(?<![^\W_])_|_(?![^\W_])")
_LINKS = re.compile(r"(?<=[#@])(?=\w)")


def report_markdown(run: Run, verdicts: Sequence[Verdict], now_s: float) -> str:
    """The report. `now_s`: the present (seconds since epoch), when it is written."""
    top = verdicts[0]
    name = f"{top.verdict} ({top.subtype})" if top.subtype else str(top.verdict)
    lines = [
        f"### {_text(name)}: {_text(top.headline)}",
        "",
        " · ".join(_text(part) for part in _facts(run, top, now_s)),
    ]
    lines += _section("Why", [fact(item) for item in top.evidence])
    if not top.is_healthy:
        lines += _section(f"{who_waits(run, top)[0].capitalize()} in what", waiting(run, top))
        lines += _section("What to do", top.next_steps)
        if found := commands(run, top):
            lines += ["", "```sh", *(escape_line(line) for line in found), "```"]
    lines += _section("Less likely", [f"{v.confidence:.0%} {v.verdict}: {v.headline}" for v in verdicts[1:]])
    lines += _section("Limits of the evidence", [f"{flag.flag}: {flag.text}" for flag in run.flags])
    more = [] if top.is_healthy else ["", f"[More about {_text(top.verdict)}]({page_of(top)})"]
    return "\n".join([*lines, *_stacks(run, top), *more]) + "\n"


def _text(text: str) -> str:
    return _LINKS.sub("<!-- -->", _SPECIAL.sub(r"\\\g<0>", escape_line(text)))


def _facts(run: Run, top: Verdict, now_s: float) -> Iterator[str]:
    yield f"confidence {top.confidence:.0%}"
    yield num_ranks(run.world_size)
    if top.step is not None:
        yield step_text(run, top.step)
    if moment := lasting(run, top, now_s):
        yield moment
    if not top.is_healthy:
        yield from where(run, top)


def _section(title: str, lines: Iterable[str]) -> list[str]:
    items = [f"- {_text(line)}" for line in lines]
    return ["", f"**{title}**", "", *items] if items else []


def _stacks(run: Run, top: Verdict) -> Iterator[str]:
    for rank in (top.culprits or top.suspects)[:MOST_STACKS]:
        found = stack_of(run.ranks[rank])
        if found is None:
            continue
        yield from ("", f"<details><summary>stack of rank {rank}, most recent call first</summary>", "", "~~~text")
        yield from (escape_line(str(frame)) for frame in program_frames(found[1])[:MOST_FRAMES])
        yield from ("~~~", "", "</details>")
