"""A report as one HTML file that opens without a network: verdict, timeline, ranks, stacks, excerpts of the logs.

It holds no script and loads nothing. Ranks in the same situation share a row; of 1,024 ranks it stays below 2 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from titan_ckpt.console.escapes import escape_line, escape_text
from titan_ckpt.debug.incident.contradictions import num_ranks, rank_list
from titan_ckpt.debug.incident.frames import program_frames
from titan_ckpt.debug.incident.kinds import WORDS, OperationState, VerdictKind
from titan_ckpt.debug.incident.records import RankRecord, Run, Situation, Thread, Verdict
from titan_ckpt.debug.report.alike import Alike, alike, last_row, mark_of
from titan_ckpt.debug.report.facts import (
    commands,
    fact,
    lasting,
    open_word,
    page_of,
    stack_of,
    step_text,
    waiting,
    where,
    who_waits,
)
from titan_ckpt.debug.report.html_style import STYLE
from titan_ckpt.debug.report.timeline import timeline
from titan_ckpt.location import redact, redact_text

MOST_PARTIES, MOST_RANKS, MOST_STACKS, MOST_LOGS = 200, 4096, 48, 16
MOST_EVENTS, MOST_FRAMES, MOST_WAITS = 40, 60, 24
_OWN_THREADS = "titan-recorder"


def report_html(run: Run, verdicts: Sequence[Verdict], states: Mapping[int, Situation], now_s: float) -> str:
    """The page. `states`: what each rank was doing; `now_s`: the present (seconds since epoch), when it is written."""
    top = verdicts[0]
    parties = alike(run, top, states)
    title = f"{top.verdict}: {top.headline}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><main>",
        *_head(run, top, now_s),
        *_why(run, verdicts),
        *_section("Operations over time", _timeline(run, parties, open_word(top))),
        *_section("Ranks", _parties(run, parties, open_word(top))),
        *_section("Stacks", _stacks(run, parties)),
        *_section("Logs", _logs(run, top)),
        *_section("Every rank", _all_ranks(run, top, states) if len(parties) < len(run.ranks) else ()),
        *_section("Limits of the evidence", _list(f"{flag.flag}: {flag.text}" for flag in run.flags)),
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(text: str) -> str:
    """One line of text without secrets, for HTML."""
    return escape(escape_line(redact_text(text)))


def _section(title: str, parts: Iterable[str]) -> list[str]:
    found = list(parts)
    return ["<section>", f"<h2>{title}</h2>", *found, "</section>"] if found else []


def _list(lines: Iterable[str], *, tag: str = "ul") -> list[str]:
    items = [f"<li>{_text(line)}</li>" for line in lines]
    return [f"<{tag}>", *items, f"</{tag}>"] if items else []


def _head(run: Run, top: Verdict, now_s: float) -> Iterator[str]:
    kind = (
        "good" if top.is_healthy else "undecided" if top.is_undecided or top.verdict == VerdictKind.RUNNING else "fault"
    )
    name = f"{top.verdict} ({top.subtype})" if top.subtype else str(top.verdict)
    yield f'<header class="{kind}"><p class="kind">{_text(name)}</p><h1>{_text(top.headline)}</h1>'
    facts = [f"confidence {top.confidence:.0%}", num_ranks(run.world_size)]
    facts += [step_text(run, top.step)] if top.step is not None else []
    facts += [f"incident {run.incident}"] if run.incident else []
    facts += [moment] if (moment := lasting(run, top, now_s)) else []
    facts += [] if top.is_healthy else where(run, top)
    yield f'<p>{" · ".join(_text(fact) for fact in facts)}</p><p class="dim">{_text(redact(run.url))}</p></header>'


def _why(run: Run, verdicts: Sequence[Verdict]) -> Iterator[str]:
    top = verdicts[0]
    who = who_waits(run, top)[0].capitalize()
    yield from _section("Why", _list(fact(item) for item in top.evidence))
    yield from _section(f"{who} for whom", _list(_chain(run, top)))
    if top.is_healthy:
        return
    yield from _section(f"{who} in what", _list(waiting(run, top)))
    steps = [*_list(top.next_steps, tag="ol"), *(f"<pre>{_text(line)}</pre>" for line in commands(run, top))]
    more = f'<p class="dim">More about {_text(top.verdict)}: {_text(page_of(top))}</p>'
    yield from _section("What to do", [*steps, more])
    others = (f"{other.confidence:.0%} {other.verdict}: {other.headline}" for other in verdicts[1:])
    yield from _section("Less likely", _list(others))


def _chain(run: Run, top: Verdict) -> list[str]:
    waiters: dict[int, list[int]] = {}
    for waiter, awaited in top.chain:
        waiters.setdefault(awaited, []).append(waiter)
    verb = who_waits(run, top)[1]
    lines = [
        f"{rank_list(ranks)} {verb if len(ranks) == 1 else verb.removesuffix('s')} for rank {awaited}"
        for awaited, ranks in waiters.items()
    ]
    return [*lines[:MOST_WAITS], *([f"and {len(lines) - MOST_WAITS:,} more"] if len(lines) > MOST_WAITS else [])]


def _timeline(run: Run, parties: Sequence[Alike], unended: str) -> Iterator[str]:
    drawn = timeline(run, parties, unended)
    if drawn:
        yield drawn
        yield (
            '<p class="dim">The newest operations of each rank, or of one rank of a party that is alike. '
            f'<span class="done">done</span> <span class="p2p">send or receive</span> <span class="pending">{unended}</span></p>'
        )


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """A table; each row is its mark (`culprit`, `suspect` or "") and its cells."""
    yield f"<table><thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead><tbody>"
    for mark, cells in rows:
        yield f'<tr class="{mark}">{"".join(f"<td>{_text(cell)}</td>" for cell in cells)}</tr>'
    yield "</tbody></table>"


def _parties(run: Run, parties: Sequence[Alike], unended: str) -> Iterator[str]:
    rows = ((party.mark, _party(run, party, unended)) for party in parties[:MOST_PARTIES])
    yield from _table(("ranks", "", "state", "at", "operation", "step", "host:pid"), rows)
    if len(parties) > MOST_PARTIES:
        yield f'<p class="dim">and {len(parties) - MOST_PARTIES:,} more parties</p>'


def _party(run: Run, party: Alike, unended: str) -> Sequence[str]:
    rank, state = party.ranks[0], party.situation
    frame, step = state.frame.place if state.frame else "", run.step_of(rank)
    record = run.ranks[rank]
    return (
        party.label, party.mark, f"{WORDS[state.kind]}{f': {state.call}' if state.call else ''}", frame,
        _operation(run, record, unended), "" if step is None else str(step), _place(record),
    )  # fmt: skip


def _operation(run: Run, record: RankRecord, unended: str) -> str:
    row = last_row(record)
    if row < 0:
        return ""
    last = run.operation(record.rank, row)
    number = f" #{last.seq}" if last.seq >= 0 else ""
    has_ended = last.retired or last.state == OperationState.COMPLETED
    return f"{last.op}{number} of {last.group}: {'ended' if has_ended else unended}"


def _place(record: RankRecord) -> str:
    return ":".join(part for part in (record.host, str(record.pid or "")) if part)


def _stacks(run: Run, parties: Sequence[Alike]) -> Iterator[str]:
    """The stack of each party's first rank, equal main threads once; those of culprits are open."""
    shown: set[tuple[str, ...]] = set()
    for party in parties:
        found = stack_of(run.ranks[party.ranks[0]])
        if found is None:
            continue
        stack, main = found
        key = tuple(frame.place for frame in main.frames)
        if len(shown) >= MOST_STACKS or (key in shown and not party.mark):
            continue
        shown.add(key)
        is_open = " open" if party.mark == "culprit" else ""
        yield f"<details{is_open}><summary>{_text(party.label)} <span>{_text(stack.source)}</span></summary>"
        others = [thread for thread in stack.threads if thread is not main and not thread.name.startswith(_OWN_THREADS)]
        yield from (_thread(thread) for thread in (main, *(others if party.mark else ())))
        yield "</details>"


def _thread(thread: Thread) -> str:
    lines = [f"{thread.name or 'thread'}{' (main)' if thread.is_main else ''}, most recent call first"]
    for frame in program_frames(thread)[:MOST_FRAMES]:
        lines.append(f"  {frame}")
        lines += [f"      {frame.text}"] if frame.text else []
    text = "\n".join(_text(line) for line in lines)
    return f"<pre>{text}</pre>"


def _logs(run: Run, top: Verdict) -> Iterator[str]:
    """What was recognised in the logs, and their last lines; those of culprits and suspects first, and open."""
    named = [*top.culprits, *top.suspects]
    ranks = [*named, *(rank for rank in run.ranks if rank not in set(named))]
    found = {rank: log for rank in ranks if (log := run.ranks[rank].log) is not None and (log.events or log.tail)}
    for rank, log in [*found.items()][:MOST_LOGS]:
        is_open = " open" if mark_of(top, rank) else ""
        yield f"<details{is_open}><summary>rank {rank} <span>{_text(log.source)}</span></summary>"
        yield from _list(f"{event.line}: {event.text}" for event in log.events[:MOST_EVENTS])
        tail = escape(escape_text(redact_text("\n".join(log.tail))))
        yield f"<pre>{tail}</pre></details>" if log.tail else "</details>"
    if len(found) > MOST_LOGS:
        yield f"<p>and the logs of {len(found) - MOST_LOGS:,} more ranks</p>"


def _all_ranks(run: Run, top: Verdict, states: Mapping[int, Situation]) -> Iterator[str]:
    ranks = list(run.ranks.values())[:MOST_RANKS]
    yield f"<details><summary>{len(ranks):,} of {len(run.ranks):,} ranks</summary>"
    rows = ((mark_of(top, r.rank), (str(r.rank), r.host, str(r.pid or ""), WORDS[states[r.rank].kind],
             states[r.rank].where.removeprefix(" at "))) for r in ranks)  # fmt: skip
    yield from _table(("rank", "host", "pid", "state", "at"), rows)
    yield "</details>"
