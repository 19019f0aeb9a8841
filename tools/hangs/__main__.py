"""`python -m tools.hangs`: run the programs, diagnose what each form of evidence holds, compare with the truth.

Evidence that is in `--keep FOLDER` already is only diagnosed again. Jobs that are well are looked at while they run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from titan_ckpt.errors import TitanError
from tools.hangs.evidence import FORMS, WITHOUT_RECORDER, end, gather, gather_logs, start
from tools.hangs.incident import INCIDENTS, Incident
from tools.hangs.rank import PROGRAMS
from tools.hangs.score import Outcome, Score, score

LOOK_EVERY_S = 2.0
DONE = "done"


def incident_scores(incident: Incident, folder: Path, *, logs_form: str = "") -> Iterator[Score]:
    """Run the program unless its evidence is there; a score for each form. `logs_form`: without our recorder."""
    if not (folder / DONE).exists():
        if folder.exists():
            shutil.rmtree(folder)
        if logs_form:
            gather_logs(incident, folder, logs_form)
        elif incident.is_healthy and not incident.end:
            _looks(incident, folder)
        else:
            gather(incident, folder)
        (folder / DONE).touch()
    if (folder / "looks.json").exists():
        for number, (outcome, told) in enumerate(json.loads((folder / "looks.json").read_text())):
            yield Score(name=incident.name, form=f"look {number}", outcome=Outcome(outcome), has_line=None, told=told)
        return
    for form in FORMS:
        if (folder / form).is_dir():
            yield score(incident, form, folder / form)


def _looks(incident: Incident, folder: Path) -> None:
    """Look at a job that is well while it runs, and once more at its end."""
    job, found = start(incident, folder), []
    try:
        while job.poll() is None:
            time.sleep(LOOK_EVERY_S)
            if any((folder / "rec").glob("*.box")):
                look = _look(incident, folder)
                found.append((look.outcome, look.told))
    finally:
        end(job, folder)
    (folder / "after").mkdir()
    shutil.copytree(folder / "rec", folder / "after" / "rec", ignore=shutil.ignore_patterns("*.sock", "*.ask"))
    shutil.copytree(folder / "tr", folder / "after" / "tr")
    shutil.copy(folder / "console.log", folder / "after")
    last = score(incident, "after", folder / "after")
    exit_code = f"exit code {job.returncode}: {last.told}"
    found.append((last.outcome if job.returncode == 0 else Outcome.REFUSED, exit_code))
    (folder / "looks.json").write_text(json.dumps(found))


def _look(incident: Incident, folder: Path) -> Score:
    """What `debug` says of the recorder's folder at this moment."""
    try:
        return score(incident, "look", folder / "rec")
    except (TitanError, OSError) as error:
        return Score(name=incident.name, form="look", outcome=Outcome.REFUSED, has_line=None, told=str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if anybody innocent was accused, or a hang called healthy."""
    parser = argparse.ArgumentParser(prog="python -m tools.hangs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (default: all)")
    parser.add_argument("--keep", type=Path, help="leave the evidence in this folder, and use what is there")
    parser.add_argument(
        "--logs", choices=WITHOUT_RECORDER, default="", help="without our recorder: torchrun's log folders alone"
    )
    parser.add_argument("--healthy", action="store_true", help="only jobs that are well")
    parser.add_argument("--faults", action="store_true", help="only jobs that are not")
    asked = parser.parse_args(arguments)
    modules = {module.__name__ for module in PROGRAMS}
    registered = [name for name, each in INCIDENTS.items() if each.program.__module__ in modules]
    names = asked.names or [name for name in registered if not (INCIDENTS[name].is_healthy and asked.faults)]
    names = [name for name in names if INCIDENTS[name].is_healthy or not asked.healthy]
    scores: list[Score] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            for one in incident_scores(
                INCIDENTS[name], (asked.keep or Path(scratch)).resolve() / name, logs_form=asked.logs
            ):
                scores.append(one)
                line = {True: "line", False: "LINE?", None: ""}[one.has_line]
                sys.stdout.write(f"{one.outcome:9} {line:5} {one.name:32} {one.form:8} {one.told[:260]}\n")
                sys.stdout.flush()
    sys.stdout.write(table(scores) + "\n")
    return int(any(one.outcome in (Outcome.ACCUSED, Outcome.HEALTHY, Outcome.REFUSED) for one in scores))


def table(scores: Sequence[Score]) -> str:
    """Outcomes by form of evidence, and how often a line at fault is named where there is one."""
    forms = sorted({_form(one) for one in scores}, key=lambda form: (*FORMS, "look").index(form))
    rows = []
    for form in forms:
        of_form = [one for one in scores if _form(one) == form]
        counts = Counter(one.outcome for one in of_form)
        lined = [one.has_line for one in of_form if one.has_line is not None]
        rows.append([form, len(of_form), *(counts[each] for each in Outcome), f"{sum(lined)}/{len(lined)}"])
    return tabulate(rows, ["form", "pieces", *map(str, Outcome), "line named"], tablefmt="github")


def _form(one: Score) -> str:
    return one.form.partition(" ")[0]


if __name__ == "__main__":
    sys.exit(main())
