"""Fuzz everything that reads bytes of others: `python -m scripts.fuzz --family manifest --minutes 20` (or `make fuzz`).

Mutations know the structure of their family (JSON, pickle opcodes, archives, lines); inputs that reach new blocks of the code are
kept and mutated on. A finding is an exception outside the error tree, more than 5 s of processor time per MB, more than 512 MB of
memory beyond the reader's stated bound, or code that runs. Findings and corpora are in `--out`; the exit code is 1 if there are
any findings. `--read FAMILY FILE` reads one input again, with a traceback. `--plants` fuzzes readers that were made faulty, one
fault at a time, and fails for each that is not found. `--scaling` measures how time grows with size.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from tools.fuzz.blocks import Blocks
from tools.fuzz.campaign import Result, keep, run_campaign
from tools.fuzz.names import FAMILIES, modules_of
from tools.fuzz.plants import PLANTS, change_of
from tools.paths import DATA, ROOT

ADDRESS_SPACE = 8 << 30


def main() -> int:
    """Fuzz the families asked for, one after the other, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--family", action="append", choices=(*FAMILIES, "redaction"), help="may be repeated (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="of processor time, for each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / ".fuzz", help="corpora and findings")
    parser.add_argument("--keep", action="store_true", help="copy small inputs to tests/data/fuzz")
    parser.add_argument("--read", nargs=2, metavar=("FAMILY", "FILE"))
    parser.add_argument("--plants", action="store_true", help="plant known faults; --minutes for each fault")
    parser.add_argument(
        "--scaling", action="store_true", help="inputs of 16, 32 and 64 KB of many shapes: is the time linear?"
    )
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return _child(*given.child)
    if given.read:
        from tools.fuzz.families import family  # imports all readers, torch among them

        family(given.read[0]).read(Path(given.read[1]).read_bytes())
        return 0
    if given.plants:
        return _plants(given.family or FAMILIES, given.out, given.minutes, given.seed)
    if given.scaling:
        return _scaling(given.family)
    if "redaction" in (given.family or ()):
        parser.error("--family redaction is for --scaling")
    results = []
    for name in given.family or FAMILIES:
        results.append(run_campaign(name, given.out, minutes=given.minutes, seed=given.seed))
        if given.keep:
            keep(name, given.out, DATA / "fuzz")
        sys.stdout.write(_table(results[-1:]))
        sys.stdout.flush()
    sys.stdout.write(_table(results))
    return 1 if any(result.findings for result in results) else 0


def _table(results: list[Result]) -> str:
    rows = [
        (r.family, f"{r.minutes:.1f}", f"{r.executions:,}", r.corpus, r.blocks, "; ".join(r.findings) or "none")
        for r in results
    ]
    headers = ("family", "minutes", "executions", "corpus", "blocks", "findings")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True) + "\n"


def _plants(families: Sequence[str], out: Path, minutes: float, seed: int) -> int:
    """Fuzz with each fault, and print how long each took to be found, or `missed`."""
    missed = 0
    for number, plant in enumerate(PLANTS):
        if plant.family not in families:
            continue
        folder = out / f"plant-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        found = run_campaign(plant.family, folder, minutes=minutes, seed=seed, plant=number)
        what = f"{60 * found.minutes:.0f} s: {'; '.join(found.findings)}" if found.findings else "missed"
        missed += not found.findings
        sys.stdout.write(f"| {number} | {plant.family} | {plant.module} | {found.executions:,} | {what} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"{missed} missed\n")
    return 1 if missed else 0


def _scaling(families: Sequence[str] | None) -> int:
    from tools.fuzz.scaling import SCALED, run_scaling  # imports all readers

    found = 0
    for name, shapes, took_s, growths in run_scaling(families or SCALED):
        sys.stdout.write(f"| {name} | {shapes} | {took_s:.0f} s | {len(growths)} |\n")
        for growth in growths:
            sys.stdout.write(f"  {growth.shape}: {growth.problem}: {', '.join(f'{s:.3f}' for s in growth.seconds)} s\n")
        sys.stdout.flush()
        found += len(growths)
    return 1 if found else 0


def _child(name: str, folder: str, seconds: str, seed: str, plant: str) -> int:
    blocks = Blocks(modules_of(name), change_of(int(plant) if plant else None))
    blocks.install()
    from tools.fuzz.families import family  # after the hook, so that its imports are counted
    from tools.fuzz.hunt import Hunt

    hunt = Hunt(family(name), Path(folder), int(seed), blocks)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.RLIM_INFINITY))
    hunt.run(float(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
