"""`titan-ckpt debug PATH`, and its verbs `collect`, `inject` and `watch`."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from titan_ckpt.arguments import nearest
from titan_ckpt.console.command import Command, CommandParser, Parser
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import write_json, write_note, write_text
from titan_ckpt.console.picture import MARK, add_force_flag, check_picture, write_marked, write_picture
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.store_arguments import add_store_arguments
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.diagnosis.looks_well import as_ended, went_on
from titan_ckpt.debug.diagnosis.rank_state import situations
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict
from titan_ckpt.debug.live.kernel_states import with_kernel_states
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.debug.report.as_json import report_json
from titan_ckpt.debug.report.html_page import report_html
from titan_ckpt.debug.report.markdown import report_markdown
from titan_ckpt.debug.report.seen_situations import seen_situations
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.debug.report.trace import num_left_out, trace_parts
from titan_ckpt.errors import TitanError, UsageError

SECOND_LOOK_S = 10.0
TICKING_S = 5.0
LONG_BYTES = 16 << 20  # about a second's reading
VERBS = ("collect", "inject", "watch")
_EPILOG = """\
  titan-ckpt debug PATH [OPTIONS]         diagnose a run, an incident folder, or any folder of dumps and logs;
                                          of several incidents the newest, with --all each in one line
  titan-ckpt debug collect [OPTIONS]      gather dumps, stacks and states of a job on this host into one folder
  titan-ckpt debug inject CASE [OPTIONS]  hang a small real job on purpose and leave its incident (a drill)
  titan-ckpt debug watch URL [OPTIONS]    follow a running job; report when it stops or a rank falls behind

examples:
  titan-ckpt debug runs/tiny
  titan-ckpt debug s3://bucket/run --all
  titan-ckpt debug ./dumps --html report.html --perfetto trace.json

A folder that is named like a verb is given as ./collect. Each verb has its own --help.
exit codes: 0 healthy, 1 a fault was found, 2 usage, 3 nothing readable, 4 a fault, or perhaps one, but the evidence does not
decide, 5 the job runs, or has just stopped: look again
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """PATH is the first word; a verb's own words follow it and are parsed by the verb."""
    parser.epilog = _EPILOG
    parser.usage = "titan-ckpt debug PATH [OPTIONS] | collect ... | inject CASE ... | watch URL ..."
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a run's URL, an incident folder, a folder or archive of dumps or logs, or one dump",
    )
    _add_options(parser)
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # else argparse says that it misses it beside PATH


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print all verdicts and flags as JSON")
    parser.add_argument("--all", action="store_true", help="judge each of several incidents, one line each")
    parser.add_argument("--markdown", action="store_true", help="print the report as Markdown, for an issue tracker")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML page that opens without a network")
    parser.add_argument("--perfetto", metavar="FILE", help="write all operations as a trace for ui.perfetto.dev")
    add_force_flag(parser)


def _add_rules(parser: Parser) -> None:
    """For the parser that sees all options: PATH may stand before them, between them or after them."""
    parser.needs("--force", "--html", "--perfetto")
    parser.excludes("--json", "--markdown")


def run(arguments: argparse.Namespace) -> int:
    """Diagnose PATH, or hand over to the verb."""
    verb = _verb(arguments.path)
    if verb is not None:
        return verb.run(_parse_verb(arguments.path, verb, arguments))
    options = Parser(prog="titan-ckpt debug", add_help=False)
    _add_options(options)
    _add_rules(options)
    _, unknown = options.parse_known_args(arguments.rest, arguments)
    if unknown:
        meant = "" if os.path.exists(arguments.path) else nearest(arguments.path, VERBS)
        raise UsageError(
            f"{meant}unexpected argument {unknown[0]!r} after PATH; `titan-ckpt debug --help` shows the forms"
        )
    for path in (arguments.html, arguments.perfetto):
        if path is not None:
            check_picture(path, is_forced=arguments.force)
    return _diagnose_all(arguments) if arguments.all else _diagnose(arguments)


def _verb(word: str) -> Command | None:
    """The command of a verb; each is imported only when it is called."""
    if word == "collect":
        from titan_ckpt.debug.live.collect import COLLECT  # the analyzer alone must start fast

        return COLLECT
    if word == "inject":
        from titan_ckpt.debug.drill.inject import INJECT

        return INJECT
    if word == "watch":
        from titan_ckpt.debug.live.watch import WATCH

        return WATCH
    return None


def _parse_verb(word: str, verb: Command, arguments: argparse.Namespace) -> argparse.Namespace:
    if before := arguments.given & {"--all", "--markdown", "--html", "--perfetto", "--force"}:
        raise UsageError(
            f"{min(before)} has no effect before {word}; `titan-ckpt debug {word} --help` shows its options"
        )
    parser = _verb_parser(word, verb)
    words = [*arguments.rest, *(["--json"] if arguments.json and "--json" not in arguments.rest else [])]
    return parser.parse_args(words)


def _verb_parser(word: str, verb: Command) -> Parser:
    parser = CommandParser(prog=f"titan-ckpt debug {word}")
    verb.configure(parser)
    add_store_arguments(parser)  # for the help: they were taken off the words before
    return parser


def verb_parsers() -> list[Parser]:
    """The parser of each verb, for the printed reference."""
    verbs = {word: _verb(word) for word in VERBS}
    return [_verb_parser(word, verb) for word, verb in verbs.items() if verb is not None]


def _diagnose(arguments: argparse.Namespace) -> int:
    evidence, verdicts = _look(arguments.path)
    if arguments.json:
        write_json(report_json(evidence, verdicts, time.time()))
    elif arguments.markdown:
        write_text(report_markdown(evidence, verdicts, time.time()))
    else:
        text = report_text(evidence, verdicts, time.time())
        write_text(text + _other_incidents(evidence.incidents, evidence.incident))
    _write_files(evidence, verdicts, arguments)
    return exit_code(verdicts[0], is_over=went_on(evidence))


def _write_files(evidence: Run, verdicts: Sequence[Verdict], arguments: argparse.Namespace) -> None:
    """The page and the trace, where they are asked for."""
    if arguments.html is not None:
        waiters = (waiter for waiter, _ in verdicts[0].chain)
        states = as_ended(evidence, seen_situations(evidence, situations(evidence), verdicts[0], waiters))
        page = report_html(evidence, verdicts, states, time.time())
        write_picture(arguments.html, page, is_forced=arguments.force)
        write_note(f"wrote {arguments.html}")
    if arguments.perfetto is not None:
        write_marked(arguments.perfetto, trace_parts(evidence, verdicts[0], mark=MARK), is_forced=arguments.force)
        left_out = num_left_out(evidence)
        more = f", without the {left_out:,} oldest operations" if left_out else ""
        has_any = any(len(record.operations) for record in evidence.ranks.values())
        how = "open it in ui.perfetto.dev or chrome://tracing" if has_any else "it is empty: no operations are recorded"
        write_note(f"wrote {arguments.perfetto}{more}; {how}")


def _read(path: str, incident: str | None = None) -> Run:
    """The evidence; a long reading shows how far it is."""
    with ProgressLine("reading") as progress:

        def show(read_bytes: int, total_bytes: int) -> None:
            if total_bytes >= LONG_BYTES:
                progress.show(read_bytes, total_bytes)

        return with_kernel_states(open_run(path, incident=incident, on_read=show), path, time.time())


def _look(path: str) -> tuple[Run, list[Verdict]]:
    """The evidence and its verdicts; of a job that may go on, after a second look at what its recorders write meanwhile.

    A rank that was starved of its processor for seconds looks stuck or frozen, and runs again at the second look.
    """
    evidence = _read(path)
    verdicts = diagnose(evidence)
    if verdicts[0].verdict not in _OF_A_MOMENT or not _is_ticking(evidence):
        return evidence, verdicts
    write_note(f"the job may go on: looking again in {SECOND_LOOK_S:.0f} s")
    time.sleep(SECOND_LOOK_S)
    evidence = _read(path)
    return evidence, diagnose(evidence)


_OF_A_MOMENT = (VerdictKind.RUNNING, VerdictKind.STUCK_ON_CPU, VerdictKind.RANK_FROZEN)


def _is_ticking(evidence: Run) -> bool:
    """Whether a recorder wrote to its black box within the last seconds: then a second look shows more."""
    beats = (record.heartbeat for record in evidence.ranks.values() if not record.is_gone)
    return any(beat and not beat.is_stopped and time.time() - beat.alive_ns / 1e9 < TICKING_S for beat in beats)


def exit_code(top: Verdict, *, is_over: bool = False) -> int:
    """0 healthy, 1 fault, 4 undecided, 5 running. In a job that ended well (`is_over`) a straggler was no fault."""
    if top.verdict == VerdictKind.STRAGGLER and is_over:
        return 0
    if top.verdict == VerdictKind.RUNNING:
        return 5
    return 0 if top.is_healthy else 4 if top.is_undecided else 1


MOST_LISTED = 20


def _other_incidents(incidents: Sequence[str], judged: str) -> str:
    """The incidents that were not judged, newest first, one line each."""
    others = [name for name in reversed(incidents) if name != judged]
    if not others:
        return ""
    lines = [f"  {escape_line(name)}" for name in others[:MOST_LISTED]]
    more = [f"  and {len(others) - MOST_LISTED} older ones"] if len(others) > MOST_LISTED else []
    return "\n".join(["other incidents here (judge each with --all):", *lines, *more]) + "\n"


def _diagnose_all(arguments: argparse.Namespace) -> int:
    """Judge each incident under PATH, oldest first. Exit code 1 if one has a fault, else the largest of theirs."""
    if arguments.markdown or arguments.html or arguments.perfetto:
        raise UsageError(
            "--all prints a line for each incident; give --markdown, --html and --perfetto one incident's folder"
        )
    path, as_text = arguments.path, not arguments.json
    codes = {0}
    reports: list[dict[str, Any]] = []
    newest = _read(path)
    for incident in newest.incidents or (newest.incident,):
        try:
            evidence = newest if incident == newest.incident else _read(path, incident)
        except TitanError as error:
            text, report = f"nothing readable: {error}", {"incident": incident, "error": str(error)}
            codes.add(1)
        else:
            verdicts = diagnose(evidence)
            top, report = verdicts[0], report_json(evidence, verdicts, time.time())
            ranks = ", ".join(map(str, top.culprits[:8])) or "-"
            text = f"{top.verdict}  rank {ranks}  {top.confidence:.0%}  {top.headline}"
            codes.add(exit_code(top, is_over=went_on(evidence)))
        if as_text:
            write_text(escape_line(f"{incident or path}  {text}") + "\n")
        reports.append(report)
    if not as_text:
        write_json(reports)
    return 1 if 1 in codes else max(codes)


DEBUG = Command(configure=configure, run=run)
