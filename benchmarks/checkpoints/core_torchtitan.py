"""Run every tool on a checkpoint saved by torchtitan 0.3.0, then resume torchtitan from each result.

    python -m venv titan && titan/bin/pip install torchtitan==0.3.0 torch==<the same>
    python -m benchmarks.checkpoints.core_torchtitan --titan titan/bin/python

Two gloo ranks train torchtitan's debug model under FSDP2. Its own CheckpointManager saves model, optimizer,
LR schedule, dataloader and progress.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.demo.ports import free_port
from titan_ckpt.loading.load import load
from tools.paths import ROOT
from tools.report import Measurement, write_section

WORLD, STEP = 2, 3
MESH = "dp_shard=2,tp=2"


def torchtitan(python: str, folder: Path, resume_from: Path | None = None) -> list[list[float]]:
    """Run the ranks; return each one's last losses."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    more = [] if resume_from is None else [str(resume_from)]
    ranks = [
        subprocess.Popen(
            [python, "-m", "benchmarks.checkpoints.core_torchtitan_rank", str(folder), *more],
            cwd=ROOT, env=os.environ | shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            raise RuntimeError(f"torchtitan failed:\n{errors[-4000:]}")
    return [json.loads(text.splitlines()[-1])["losses"] for text, _ in outputs]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`titan-ckpt ...` in its own process."""
    return subprocess.run([sys.executable, "-m", "titan_ckpt", *arguments], cwd=ROOT, capture_output=True, text=True)


def by_dcp(folder: Path) -> dict[str, Any]:
    """Every entry as plain `dcp.load` reads it, under its flat name."""
    metadata = FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {
        fqn: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def differences(expected: dict[str, Any], url: str) -> int:
    """Entries that our `load` reads differently."""
    found = {fqn: torch.full_like(v, -1) if isinstance(v, torch.Tensor) else v for fqn, v in expected.items()}
    for fqn, value in found.items():
        if not isinstance(value, torch.Tensor):
            found[fqn] = type(value)()
    load(url, found)
    same = (torch.equal(v, found[k]) if isinstance(v, torch.Tensor) else v == found[k] for k, v in expected.items())
    return sum(not is_same for is_same in same)


def flipped(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1
        file.seek(at)
        file.write(bytes([byte]))


def found_by_verify(folder: Path, fqn: str) -> bool:
    """Whether `verify --data` names the tensor with one flipped bit; restores the bit."""
    checkpoint = open_checkpoint(str(folder))
    chunk = checkpoint.locate(checkpoint.manifest.chunk(checkpoint.manifest.by_fqn[fqn], 0), row_major=False)
    path, at = folder / chunk.file, chunk.offset + chunk.payload_offset + 5
    flipped(path, at)
    facts = json.loads(tool("verify", str(folder), "--data", "--json").stdout)
    flipped(path, at)
    return [problem["fqn"] for problem in facts["problems"]] == [fqn]


def row(what: str, figure: object, bar: object, holds: bool, peer: str = "") -> Measurement:
    """One row of the table."""
    return Measurement(what=what, figure=str(figure), bar=str(bar), holds=holds, peer=peer)


def look(run: Path, expected: dict[str, Any]) -> list[Measurement]:
    """List, read and verify torchtitan's own folder, and compare with what plain DCP reads."""
    saved = run / f"step-{STEP}"
    names = [fqn for fqn, value in expected.items() if isinstance(value, torch.Tensor)]
    listed = [entry["step"] for entry in json.loads(tool("ls", str(run), "--json").stdout)]
    inspected = len(json.loads(tool("inspect", str(saved), "--json").stdout)["tensors"])
    differing = differences(expected, str(saved))
    verified = tool("verify", str(saved), "--data")
    larger = [fqn for fqn in names if expected[fqn].numel() > 8]
    tried = larger[:: max(1, len(larger) // 10)]
    hits = sum(found_by_verify(saved, fqn) for fqn in tried)
    flip, peer = "`verify --data`, one bit flipped: tensor named", "dcp.load reads it without a word"
    return [
        row("`ls` of its run: steps", listed, [STEP], listed == [STEP]),
        row("`inspect`: tensors", inspected, len(names), inspected == len(names)),
        row("`load` against plain dcp.load: entries that differ", differing, 0, differing == 0, _count(expected)),
        row("`verify --data`", verified.stdout.strip().rpartition(": ")[2], "whole", verified.returncode == 0),
        row(flip, f"{hits} of {len(tried)}", "all", hits == len(tried), peer),
    ]


def copy(
    python: str, folder: Path, name: str, expected: dict[str, Any], losses: list[list[float]]
) -> list[Measurement]:
    """Check a tool's output copy: read it with plain DCP, run `diff` on it, resume torchtitan from it."""
    run, saved = folder / "checkpoint", folder / "checkpoint" / f"step-{STEP}"
    if name == "`cp`":
        target, made, words = folder / "mirror", folder / "mirror" / f"step-{STEP}", ["cp"]
    else:
        target, made, words = folder / "out", folder / "out" / f"step-{STEP:08d}", ["reshard", "--mesh", MESH]
    done = tool(words[0], str(run), str(target), *words[1:])
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr}")
    got = by_dcp(made)
    wrong = sum(not _same(value, got[fqn]) for fqn, value in expected.items()) + len(set(got) ^ set(expected))
    compared = tool("diff", str(saved), str(made if name == "`cp`" else target), "--values", "--json")
    equal = json.loads(compared.stdout)
    resumed = torchtitan(python, folder / f"resumed-{target.name}", made)
    tensors = sum(isinstance(value, torch.Tensor) for value in expected.values())
    outcome = "equal" if resumed == losses else "differ"
    return [
        row(f"{name}, read by plain dcp.load: entries that differ", wrong, 0, wrong == 0, _count(expected)),
        row(f"`diff --values` of source and {name}: tensors equal", equal["equal"], tensors, equal["is_equal"]),
        row(f"torchtitan resumes from {name}: next 2 losses", outcome, "equal", resumed == losses),
    ]


def measure(python: str, folder: Path) -> list[Measurement]:
    """The rows of the table."""
    losses = torchtitan(python, folder)
    expected = by_dcp(folder / "checkpoint" / f"step-{STEP}")
    bars = look(folder / "checkpoint", expected)
    for name in ("`cp`", f"`reshard --mesh {MESH}`"):
        bars += copy(python, folder, name, expected, losses)
    return bars


def _count(entries: dict[str, Any]) -> str:
    tensors = sum(isinstance(value, torch.Tensor) for value in entries.values())
    return f"{tensors} tensors, {len(entries) - tensors} values"


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--titan", required=True, help="the Python of an environment that has torchtitan")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bars = measure(arguments.titan, Path(folder))
    write_section("core-torchtitan", "A checkpoint of torchtitan 0.3.0, FSDP2 on 2 gloo ranks, through the tools", bars)


if __name__ == "__main__":
    main()
