"""Feed the debugger damaged evidence until the time is up: `python -m scripts.fuzz_debug --minutes 60` (or `make fuzz`).

Real incidents (dumps, logs, stacks, black boxes) are copied with bytes flipped, cut, doubled, packed or swapped between files,
and diagnosed. An exception other than TitanError, a diagnosis of more than 20 s of CPU time (or 10 minutes of wall time), or
more than 1 GB of memory ends the run and prints the seed; `--seed S --rounds 1` reproduces it.
"""

from __future__ import annotations

import argparse
import gzip
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zstandard

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.black_box import HEADER_BYTES, RECORD
from titan_ckpt.debug.record.hooks import BoxWriter
from titan_ckpt.debug.report.as_json import report_json
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.errors import TitanError
from tools.paths import INCIDENTS

LONGEST_S = 20  # CPU time, independent of other load
LONGEST_BY_CLOCK_S = 600
MOST_BYTES = 1 << 30
MAX_FILES = 12


def main() -> int:
    """Fuzz until the time is up or a check fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=0, help="stop after that many rounds (default: when time is up)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round; each round adds 1")
    given = parser.parse_args()
    started = time.monotonic()
    give_up = started + 60 * given.minutes
    with tempfile.TemporaryDirectory() as scratch:
        incidents = [[(path.name, path.read_bytes()) for path in sorted(case.iterdir())] for case in _cases()]
        incidents.append(_boxes(Path(scratch)))
        seed = given.seed
        while time.monotonic() < give_up and (not given.rounds or seed < given.seed + given.rounds):
            _round(seed, incidents, Path(scratch) / "round")
            seed += 1
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{seed - given.seed} rounds")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    rounds, hours = seed - given.seed, (time.monotonic() - started) / 3600
    sys.stdout.write(f"{rounds} rounds, {rounds / hours:.0f} an hour, no crash, no hang, peak {peak} MB\n")
    return 0


def _cases() -> list[Path]:
    return [case for case in sorted(INCIDENTS.iterdir()) if case.is_dir()]


def _boxes(folder: Path) -> list[tuple[str, bytes]]:
    """Black boxes of four ranks; rank 2 lacks the last operation."""
    found = []
    for rank in range(4):
        box = BoxWriter(folder / f"rank_{rank:05d}.box", rank=rank, world_size=4, capacity=64)
        box.add_text("op", 0, "all_reduce")
        box.add_text("dtype", 0, "Float")
        box.add_text("group", 0, ["0", "default_pg", [0, 1, 2, 3]])
        box.add_text("site", 1, [["/srv/train.py", 10, "step"], ["/srv/train.py", 99, "main"]])
        for number in range(1, 80 - (rank == 2)):
            slot = HEADER_BYTES + ((number - 1) % 64) * RECORD.size
            RECORD.pack_into(box.map, slot, number, number + 1, 8, number, 1, -1, 0, 0, 0, 0, 1, number)
        found.append((box.path.name, bytes(box.map)[: HEADER_BYTES + 64 * RECORD.size + 1024]))
        box.map.close()
    return found


def _round(seed: int, incidents: list[list[tuple[str, bytes]]], folder: Path) -> None:
    rng = random.Random(seed)
    files = rng.choice(incidents)
    folder.mkdir(exist_ok=True)
    written = []
    for name, data in rng.sample(files, min(len(files), MAX_FILES)):
        written.append(_write(rng, folder, name, data, files))
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    signal.alarm(LONGEST_BY_CLOCK_S)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        run = open_run(str(folder))
        verdicts = diagnose(run)
        assert verdicts, "no verdict"
        report_text(run, verdicts)
        report_json(run, verdicts)
    except TitanError:
        pass
    except BaseException:
        sys.stderr.write(f"\nseed {seed}: {', '.join(written)}\n")
        raise
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > MOST_BYTES:
        raise MemoryError(f"seed {seed}: more than {MOST_BYTES >> 20} MB")
    for name in written:
        (folder / name).unlink()


def _too_long(_number: int, _frame: object) -> None:
    raise TimeoutError(f"a diagnosis took longer than {LONGEST_S} s of CPU time or {LONGEST_BY_CLOCK_S} s of wall time")


def _write(rng: random.Random, folder: Path, name: str, data: bytes, files: list[tuple[str, bytes]]) -> str:
    if rng.random() < 0.6:
        data = rng.choice(_MUTATIONS)(rng, data)
    if rng.random() < 0.05:
        data = rng.choice(files)[1]
    if rng.random() < 0.1:
        name, data = rng.choice(((f"{name}.gz", gzip.compress(data, 1)), (f"{name}.zst", zstandard.compress(data, 1))))
        data = _flip(rng, data) if rng.random() < 0.5 else data
    (folder / name).write_bytes(data)
    return name


def _flip(rng: random.Random, data: bytes) -> bytes:
    broken = bytearray(data or b"x")
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        broken[rng.randrange(len(broken))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(broken)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _splice(rng: random.Random, data: bytes) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:a] + data[b:], data[:b] + data[a:], data[:a] + rng.randbytes(b - a) + data[b:]))


def _digits(rng: random.Random, data: bytes) -> bytes:
    """Replace digits in the text: huge, negative, empty."""
    places = [i for i in range(len(data)) if 48 <= data[i] <= 57]
    if not places:
        return _flip(rng, data)
    for place in sorted(rng.sample(places, min(len(places), rng.choice((1, 2, 20)))), reverse=True):
        data = (
            data[:place]
            + rng.choice((b"-1", b"99999999999999999999", b"", b"0", b"1e999", b"null"))
            + data[place + 1 :]
        )
    return data


_MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (_flip, _flip, _cut, _splice, _digits)


if __name__ == "__main__":
    sys.exit(main())
