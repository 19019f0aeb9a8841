"""`titan-ckpt debug PATH`, and its verbs `collect`, `inject` and `watch`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import write_json, write_note, write_text
from titan_ckpt.debug.diagnosis.diagnose import diagnose
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Run, Verdict
from titan_ckpt.debug.read.reader import open_run
from titan_ckpt.debug.report.as_json import report_json
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.errors import TitanError, UsageError

SECOND_LOOK_S = 10.0
TICKING_S = 5.0
_EPILOG = """\
  titan-ckpt debug PATH [--json] [--all]  diagnose a run, an incident folder, or any folder of dumps and logs;
                                          of several incidents the newest, with --all each in one line
  titan-ckpt debug collect [OPTIONS]      gather dumps, stacks and states of a job on this host into one folder
  titan-ckpt debug inject CASE [OPTIONS]  hang a small real job on purpose and leave its incident (a drill)
  titan-ckpt debug watch URL [OPTIONS]    follow a running job; report when it stops or a rank falls behind

A folder that is named like a verb is given as ./collect. Each verb has its own --help.
exit codes: 0 healthy, 1 a fault was found, 2 usage, 3 nothing readable, 4 a fault, or perhaps one, but the evidence does not
decide, 5 the job runs, or has just stopped: look again
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """PATH is the first word; a verb's own words follow it and are parsed by the verb."""
    parser.epilog = _EPILOG
    parser.usage = "titan-ckpt debug PATH [--json] [--all] | collect ... | inject CASE ... | watch URL ..."
    parser.add_argument(
        "path", metavar="PATH", help="a run's URL, an incident folder, a folder of dumps or of logs, or one dump"
    )
    parser.add_argument("--json", action="store_true", help="print all verdicts and flags as JSON")
    parser.add_argument("--all", action="store_true", help="judge each of several incidents, one line each")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Diagnose PATH, or hand over to the verb."""
    verb = _verb(arguments.path)
    if verb is not None:
        return verb.run(_parse_verb(arguments.path, verb, arguments))
    for word in arguments.rest:
        if word not in ("--json", "--all"):
            raise UsageError(f"unexpected argument {word!r} after PATH; `titan-ckpt debug --help` shows the forms")
    as_text = not (arguments.json or "--json" in arguments.rest)
    if arguments.all or "--all" in arguments.rest:
        return _diagnose_all(arguments.path, as_text=as_text)
    return _diagnose(arguments.path, as_text=as_text)


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
    parser = _verb_parser(word, verb)
    words = [*arguments.rest, *(["--json"] if arguments.json and "--json" not in arguments.rest else [])]
    return parser.parse_args(words)


def _verb_parser(word: str, verb: Command) -> argparse.ArgumentParser:
    parser = Parser(prog=f"titan-ckpt debug {word}")
    verb.configure(parser)
    return parser


def verb_parsers() -> list[argparse.ArgumentParser]:
    """The parser of each verb, for the printed reference."""
    verbs = {word: _verb(word) for word in ("collect", "inject", "watch")}
    return [_verb_parser(word, verb) for word, verb in verbs.items() if verb is not None]


def _diagnose(path: str, *, as_text: bool) -> int:
    evidence, verdicts = _look(path)
    if as_text:
        text = report_text(evidence, verdicts, time.time())
        write_text(text + _other_incidents(evidence.incidents, evidence.incident))
    else:
        write_json(report_json(evidence, verdicts, time.time()))
    return exit_code(verdicts[0])


def _look(path: str) -> tuple[Run, list[Verdict]]:
    """The evidence and its verdicts; of a job that may go on, after a second look at what its recorders write meanwhile."""
    evidence = open_run(path)
    verdicts = diagnose(evidence)
    if verdicts[0].verdict != VerdictKind.RUNNING or not _is_ticking(evidence):
        return evidence, verdicts
    write_note(f"the job may go on: looking again in {SECOND_LOOK_S:.0f} s")
    time.sleep(SECOND_LOOK_S)
    evidence = open_run(path)
    return evidence, diagnose(evidence)


def _is_ticking(evidence: Run) -> bool:
    """Whether a recorder wrote to its black box within the last seconds: then a second look shows more."""
    beats = (record.heartbeat for record in evidence.ranks.values())
    return any(beat and not beat.is_stopped and time.time() - beat.alive_ns / 1e9 < TICKING_S for beat in beats)


def exit_code(top: Verdict) -> int:
    """0 healthy, 1 fault, 4 undecided, 5 running."""
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


def _diagnose_all(path: str, *, as_text: bool) -> int:
    """Judge each incident under `path`, oldest first. Exit code 1 if one has a fault, else the largest of theirs."""
    codes = {0}
    reports: list[dict[str, Any]] = []
    newest = open_run(path)
    for incident in newest.incidents or (newest.incident,):
        try:
            evidence = newest if incident == newest.incident else open_run(path, incident=incident)
        except TitanError as error:
            text, report = f"nothing readable: {error}", {"incident": incident, "error": str(error)}
            codes.add(1)
        else:
            verdicts = diagnose(evidence)
            top, report = verdicts[0], report_json(evidence, verdicts, time.time())
            ranks = ", ".join(map(str, top.culprits[:8])) or "-"
            text = f"{top.verdict}  rank {ranks}  {top.confidence:.0%}  {top.headline}"
            codes.add(exit_code(top))
        if as_text:
            write_text(escape_line(f"{incident or path}  {text}") + "\n")
        reports.append(report)
    if not as_text:
        write_json(reports)
    return 1 if 1 in codes else max(codes)


DEBUG = Command(configure=configure, run=run)
