"""A real hang under NCCL: one rank leaves out a collective, the watchdog dumps the Flight Recorder, `debug` names the rank.

    python -m benchmarks.diagnosis.nccl_hang --json FILE [--tiny]

Two processes; on one GPU both use it, where NCCL allows two ranks on a device. --tiny does the same over gloo on a CPU, where
our recorder dumps. Exit code 1 if the verdict is another, 3 if the job could not be made to hang; the last line says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titan_ckpt.demo.ports import free_port
from tools.paths import ROOT
from tools.report import Measurement

RANKS, CULPRIT, HANG_S, LIMIT_S = 2, 1, 15, 240.0
WHAT = "a collective left out by one rank of two"


def start(folder: Path, *, is_tiny: bool) -> list[subprocess.CompletedProcess[str]]:
    """Run the job to its timeout; what its ranks wrote."""
    backend = "gloo" if is_tiny else "nccl"
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": str(folder / "nccl_trace_rank_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "nccl_trace_rank_"),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.diagnosis.nccl_hang_rank", str(folder), backend, str(HANG_S)],
            cwd=ROOT, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    done = []
    for rank in ranks:
        try:
            out, errors = rank.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            out, errors = rank.communicate()
        done.append(subprocess.CompletedProcess(rank.args, rank.returncode, out, errors))
    return done


def diagnose(folder: Path) -> list[dict[str, Any]]:
    """The verdicts of `titan-ckpt debug`."""
    command = [sys.executable, "-m", "titan_ckpt", "debug", str(folder), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    verdicts: list[dict[str, Any]] = json.loads(done.stdout)["verdicts"] if done.stdout else []
    return verdicts


def main(arguments: Sequence[str] | None = None) -> int:
    """Hang the job and judge the verdict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        ranks = start(Path(name), is_tiny=asked.tiny)
        dumps = sorted(path.name for path in Path(name).rglob("*") if path.is_file())
        verdicts = diagnose(Path(name)) if dumps else []
    if not dumps:
        lines = "".join(rank.stderr for rank in ranks).strip().splitlines()
        refusals = [line for line in lines if "Duplicate GPU" in line] or lines[-1:]
        sys.stderr.write(f"no dump: {refusals[0] if refusals else 'no output'}\n")
        return 3
    found = verdicts[0] if verdicts else {}
    is_right = found.get("culprits") == [CULPRIT]
    figure = f"{found.get('verdict', 'no verdict')}, culprits {found.get('culprits', [])}, from {len(dumps)} files"
    row = Measurement(what=f"{WHAT}, diagnosed", figure=figure, bar=f"rank {CULPRIT}", holds=is_right)
    asked.json.write_text(json.dumps([asdict(row)], indent=1))
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
