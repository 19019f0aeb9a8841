"""Damage every kind of file of a checkpoint in every way, and record what `verify --data` and `load` report.

The run has two similar steps; the second is damaged. `load` must either refuse or return exactly what was saved. It never reads
`.metadata` and the framing around payloads, so damage there does not affect it; `verify` must still report it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.format import manifest_json as manifest_module
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver

STEP, OTHER = "step-00000002", "step-00000001"
FILES = {
    "data": "a-*/__0_0.distcp", "manifest.json": "a-*/manifest.json", "digests.bin": "a-*/digests.bin",
    ".metadata": ".metadata", "COMMIT.json": "COMMIT.json", "assets": "a-*/assets/tokenizer.json",
}  # fmt: skip
HOWS = ("flip", "truncate", "swap", "delete")


@dataclass(slots=True)
class DamageRow:
    """One row of the table: a kind of file, a kind of damage, and counts of the outcomes."""

    file: str
    how: str
    cases: int = 0
    found: int = 0
    named: int = 0
    refused: int = 0
    right: int = 0
    wrong: int = 0
    missed: list[str] = field(default_factory=list)


def state_of(step: int) -> dict[str, Any]:
    """Tensors and a value that encode the step."""
    tensors = {f"layers.{n}.w": torch.full((50, 10 + n), float(step * 10 + n)) for n in range(4)}
    return {"model": tensors, "note": f"of step {step}"}


def make_run(folder: Path, codec: str) -> Path:
    """Save a run of two steps, with digests in a file beside the manifest."""
    limit, manifest_module.MAX_INLINE_DIGESTS = manifest_module.MAX_INLINE_DIGESTS, 2
    try:
        with Saver(str(folder), SaveOptions(codec=codec)) as saver:
            for step in (1, 2):
                saver.save(state_of(step), step=step, assets={"tokenizer.json": f"{{{step}}}".encode() * 20})
    finally:
        manifest_module.MAX_INLINE_DIGESTS = limit
    return folder


def damage_table(folder: Path, *, seed: int, flips: int, codec: str) -> list[DamageRow]:
    """One row per kind of file and damage; flips and truncations are tried `flips` times at random offsets."""
    pristine, rng = make_run(folder / "pristine", codec), random.Random(seed)
    rows = []
    for file, pattern in FILES.items():
        for how in HOWS:
            row = DamageRow(file, how)
            for _ in range(flips if how in ("flip", "truncate") else 1):
                run = Path(shutil.copytree(pristine, folder / "run"))
                fqns = _damage(run, pattern, how, rng)
                _judge(run, fqns, row)
                shutil.rmtree(run)
            rows.append(row)
    return rows


def _damage(run: Path, pattern: str, how: str, rng: random.Random) -> set[str]:
    """Damage the file; return the names of tensors and values whose bytes changed, for a data file that still exists."""
    (path,) = run.glob(f"{STEP}/{pattern}")
    data = bytearray(path.read_bytes())
    hit: set[str] = set()
    if how == "flip":
        at = rng.randrange(len(data))
        data[at] ^= rng.randrange(1, 256)
        hit = {name for name, start, end in _places(run) if path.suffix == ".distcp" and start <= at < end}
        path.write_bytes(data)
    elif how == "truncate":
        length = rng.randrange(len(data))
        hit = {name for name, _, end in _places(run) if path.suffix == ".distcp" and end > length}
        path.write_bytes(data[:length])
    elif how == "delete":
        path.unlink()
    else:
        (other,) = run.glob(f"{OTHER}/{pattern}")
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    return hit


def _places(run: Path) -> Iterator[tuple[str, int, int]]:
    manifest = open_checkpoint(str(run), step=2).manifest
    for tensor in manifest.tensors:
        for chunk in manifest.chunks_of(tensor):
            start = chunk.offset + chunk.payload_offset
            yield tensor.fqn, start, start + chunk.payload_length
    for entry in manifest.objects:
        yield entry.fqn, entry.offset, entry.offset + entry.length


def _judge(run: Path, hit: set[str], row: DamageRow) -> None:
    row.cases += 1
    try:
        problems = verify(f"{run}@2", read_data=True)
        is_found, named = bool(problems), {problem.fqn for problem in problems}
    except TitanError:
        is_found, named = True, set[str | None]()
    row.found += is_found
    row.named += hit <= named
    if not is_found or not hit <= named:
        row.missed.append(f"verify: {hit} of {named}")
    outcome = _load(run)
    row.refused += outcome == "refused"
    row.right += outcome == "right"
    row.wrong += outcome == "wrong"


def _load(run: Path) -> str:
    state, expected = state_of(0), state_of(2)
    try:
        checkpoint = open_checkpoint(f"{run}@2")
        load(checkpoint, state)
        asset = checkpoint.asset("tokenizer.json")
    except TitanError:
        return "refused"
    is_right = all(torch.equal(state["model"][name], tensor) for name, tensor in expected["model"].items())
    return "right" if is_right and state["note"] == expected["note"] and asset == b"{2}" * 20 else "wrong"
