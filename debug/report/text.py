"""Verdicts as text: what, where, why, what to do, in about twenty lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from titan_ckpt.console.escapes import escape_line
from titan_ckpt.debug.incident.contradictions import num_ranks, rank_list
from titan_ckpt.debug.incident.records import Run, Verdict
from titan_ckpt.debug.report.facts import commands, fact, page_of, step_text, waiting, when, where, who_waits

WIDTH = 100
MAX_EVIDENCE = 6
MAX_OTHERS = 3


def report_text(run: Run, verdicts: Sequence[Verdict], now_s: float | None = None) -> str:
    """The top verdict in full, the others in a line each. `now_s`: the present (seconds since epoch), for the age of a hang."""
    top = verdicts[0]
    moment = when(run, top, now_s) if now_s is not None and not top.is_healthy else ""
    name = f"{top.verdict} ({top.subtype})" if top.subtype else top.verdict
    lines = [
        f"{name}: {_wrapped(top.headline, len(name) + 2)}",
        *_facts(run, top),
        *([f"  {moment}"] if moment else []),
        "",
    ]
    if top.evidence:
        lines += ["why:", *(f"  - {_wrapped(text, 4)}" for text in _why(top))]
    if top.chain:
        lines.append(_chain(run, top))
    if not top.is_healthy and (held := list(waiting(run, top))):
        lines += [f"{who_waits(run, top)[0]} in what:", *(f"  - {_wrapped(line, 4)}" for line in held)]
    if not top.is_healthy and (located := where(run, top)):
        lines.append(f"where: {_wrapped('; '.join(located), 2)}")
    steps = (*top.next_steps, *(() if top.is_healthy else commands(run, top)))
    if steps:
        lines += ["what to do:", *(f"  {i}. {_wrapped(step, 5)}" for i, step in enumerate(steps, 1))]
    for other in verdicts[1 : 1 + MAX_OTHERS]:
        word = "less likely" if other.confidence < top.confidence else "also"
        lines.append(f"{word} ({other.confidence:.0%}): {other.verdict}: {_wrapped(other.headline, 2)}")
    lines += [f"note: {flag.flag}: {escape_line(flag.text)}{_ranks(flag.ranks)}" for flag in run.flags[:4]]
    if len(run.flags) > 4:
        lines.append(f"note: {len(run.flags) - 4} more flags; see --json")
    if not top.is_healthy:
        lines.append(f"more about {top.verdict}: {page_of(top)}")
    return "\n".join(lines) + "\n"


def _why(top: Verdict) -> list[str]:
    """The evidence; where there is much, that of the ranks at fault before the others'."""
    if len(top.evidence) <= MAX_EVIDENCE:
        return [fact(item) for item in top.evidence]
    named = top.culprits or top.suspects
    places = sorted(range(len(top.evidence)), key=lambda place: top.evidence[place].rank not in named)[:MAX_EVIDENCE]
    shown = [fact(top.evidence[place]) for place in sorted(places)]
    return [*shown, f"and {len(top.evidence) - len(shown)} more: see --json"]


def _facts(run: Run, top: Verdict) -> list[str]:
    facts = [f"confidence {top.confidence:.0%}", num_ranks(run.world_size)]
    if top.suspects and not top.culprits:
        facts.append(f"nobody is accused; suspects: {rank_list(top.suspects)}")
    if top.step is not None:
        facts.append(step_text(run, top.step))
    if run.incident:
        facts.append(
            f"incident {escape_line(run.incident)}"
            + (f" (newest of {len(run.incidents)})" if len(run.incidents) > 1 else "")
        )
    return ["  " + " · ".join(facts)]


def _chain(run: Run, top: Verdict) -> str:
    pairs = [f"{waiter} -> {awaited}" for waiter, awaited in top.chain[:8]]
    more = f", and {len(top.chain) - 8} more" if len(top.chain) > 8 else ""
    return f"{who_waits(run, top)[0]} for whom: {', '.join(pairs)}{more}"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"


def _wrapped(text: str, indent: int) -> str:
    lines = textwrap.wrap(escape_line(text), WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * min(indent, 4)}".join(lines)
