"""Follow drills live with the screens: how soon after the recorder's stall time the bar names the culprit, and whether it ever
named another rank. `python -m tools.hangs.live_screens [--tries N] [CASE ...]`."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.debug.drill.inject import CASES, culprit_of
from titan_ckpt.debug.incident.waits import began_ns
from titan_ckpt.debug.record.environment import environment
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import NO_FAULT
from titan_ckpt.tui.data.standing import standing

RANKS, STALL_S, DEADLINE_S, POLL_S = 4, 1.5, 60.0, 0.1
USUAL = ("sigstop", "dataloader", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the screens showed once the culprit was named. `late_s`: after the stall time; None if it was not named in time."""

    case: str
    late_s: float | None
    wrong: tuple[str, ...]
    bar: str


def start(case: str, folder: Path, store: Path) -> list[subprocess.Popen[bytes]]:
    """The ranks of a drill, which nobody ends."""
    command = [
        sys.executable, "-m", "titan_ckpt.debug.drill.rank_main", case, "--world-size", str(RANKS), "--culprit",
        str(culprit_of(RANKS)), "--folder", str(folder), "--store", str(store), "--stall-s", str(STALL_S),
    ]  # fmt: skip
    variables = {**os.environ, **environment(2000), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(RANKS):
        with (folder / f"rank_{rank:05d}.log").open("wb") as log:
            one = [*command, "--rank", str(rank)]
            ranks.append(subprocess.Popen(one, stdout=log, stderr=log, env={**variables, "RANK": str(rank)}))
    return ranks


async def follow(case: str, folder: Path) -> Look:
    """Open the screens as soon as there is evidence, follow, and read the bar until it names the culprit."""
    while len(list(folder.glob("*.box"))) < RANKS:
        await asyncio.sleep(POLL_S)
    deadline = time.monotonic() + DEADLINE_S
    app, wrong, bar, seen = TitanApp(find_content(str(folder))), set[str](), "", -1
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.press("f")
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            incident = app.session.incident.value
            if incident is None or app.session.incident.version == seen:
                continue
            seen, bar, top = app.session.incident.version, standing(incident, time.time()).text(118), incident.top
            if incident.is_unconfirmed or top.verdict in NO_FAULT:
                continue
            if top.culprits == (culprit_of(RANKS),) and top.verdict == CASES[case].verdict:
                late_s = time.time() - (began_ns(incident.run) / 1e9 + STALL_S)
                return Look(case=case, late_s=late_s, wrong=tuple(sorted(wrong)), bar=bar)
            if not set(top.culprits) <= {culprit_of(RANKS)}:
                wrong.add(f"{top.verdict} {top.culprits}")
    return Look(case=case, late_s=None, wrong=tuple(sorted(wrong)), bar=bar)


def look_at(case: str) -> Look:
    """Run one drill and follow it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "job"
        folder.mkdir(mode=0o700)
        ranks = start(case, folder, Path(scratch) / "store")
        try:
            return asyncio.run(follow(case, folder))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def main() -> int:
    """Print a line per try; 1 if a culprit was named late or wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=USUAL, metavar="CASE", help=f"drills (default {' '.join(USUAL)})")
    parser.add_argument("--tries", type=int, default=1, metavar="N", help="tries of each (default 1)")
    parser.add_argument(
        "--most-s", type=float, default=5.0, metavar="S", help="seconds after the stall time (default 5)"
    )
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no such drill: {', '.join(sorted(unknown))}")
    num_bad = 0
    for case in given.cases:
        for _ in range(given.tries):
            look = look_at(case)
            late = "never" if look.late_s is None else f"{look.late_s:.1f} s"
            num_bad += look.late_s is None or look.late_s > given.most_s or bool(look.wrong)
            sys.stdout.write(f"{case:<14} {late:>8}  wrong: {', '.join(look.wrong) or 'none'}  [{look.bar}]\n")
            sys.stdout.flush()
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
