"""Look at healthy live jobs, again and again: nobody may be accused, and no job may be called anything but running or well.

    python -m tools.healthy.campaign [--kinds ddp,fsdp2] [--looks 20] [--seconds 15] [--ranks 3] [--seed 1]

Each kind of `tools.healthy.jobs` runs once; the looks fall at random moments from the first evidence on, two
after its end.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from titan_ckpt.console.output import write_text
from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.errors import NotFoundError
from tools.healthy.jobs import KINDS, start

PATIENCE_S = 900.0  # on a busy machine an import of torch takes a minute
WELL = ("HEALTHY", "RUNNING", "STRAGGLER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a job said; "" where nothing was there to read yet."""

    verdict: str
    culprits: tuple[int, ...]
    headline: str

    @property
    def is_wrong(self) -> bool:
        """Whether it accused a rank, or found a fault."""
        return bool(self.verdict) and (self.verdict not in (*WELL, "INSUFFICIENT_DATA"))


def look(folder: Path) -> Look:
    """One look at what a job's recorders have written so far."""
    try:
        top = diagnose(open_run(str(folder)))[0]
    except NotFoundError:
        return Look(verdict="", culprits=(), headline="")
    return Look(verdict=str(top.verdict), culprits=top.culprits, headline=top.headline)


def looks_at(kind: str, folder: Path, *, looks: int, seconds: float, ranks: int, seed: int) -> list[Look]:
    """Run a job and look at it `looks` times while it runs and twice afterwards."""
    moments = sorted(random.Random(f"{seed}{kind}").uniform(0, seconds) for _ in range(looks))
    processes = start(kind, folder, world=ranks, seconds=seconds)
    try:
        while look(folder).verdict == "" and any(process.poll() is None for process in processes):
            time.sleep(0.2)
        found, began = [], time.monotonic()
        for moment in moments:
            time.sleep(max(0.0, began + moment - time.monotonic()))
            found.append(look(folder))
        codes = [process.wait(timeout=PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"the job {kind} failed: exit codes {codes}")
    return [*found, look(folder), look(folder)]


def main() -> int:
    """Run the campaign; 1 if a look was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--looks", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    total = wrong = 0
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = looks_at(
                kind, Path(folder) / "job", looks=options.looks, seconds=options.seconds, ranks=options.ranks, seed=options.seed
            )  # fmt: skip
        counts = {
            verdict: sum(one.verdict == verdict for one in found) for verdict in sorted({one.verdict for one in found})
        }
        bad = [one for one in found if one.is_wrong]
        write_text(f"{kind:18} {counts}\n" + "".join(f"    WRONG {one}\n" for one in bad))
        total, wrong = total + len(found), wrong + len(bad)
    write_text(f"{total} looks, {wrong} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
