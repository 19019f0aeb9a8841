"""The vision example, trained to read scikit-learn's digits on one mesh, resharded, and resumed on another.

    python -m benchmarks.training.vision

Two real jobs of four ranks over gloo: one on dp_shard=2,tp=2 to the end, one on dp_shard=4 from its checkpoint of the middle,
which `reshard` wrote for that mesh. Writes a section of docs/performance.md; exit code 1 if a bar is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.paths import EXAMPLES, ROOT
from tools.report import Measurement, write_section

STEPS, HALF = 60, 30
ACCURACY_BAR, LOSS_BAR = 0.9, 1e-3
TITLE = "Vision: a ViT that reads handwritten digits"
NOTES = """`examples/vit_digits.py` and `vit_digits.toml`: 4 layers, dim 64, patches of 4 x 4; 60 steps of 64 of the 1438
images that are not held out; accuracy on the 359 that are. Four ranks over gloo on dp_shard=2,tp=2; then, from its checkpoint
of step 30, resharded by `titan-ckpt reshard`, four ranks on dp_shard=4. Losses are compared over steps 31 to 60."""


def command(*words: str) -> None:
    """Run titan-ckpt."""
    subprocess.run([sys.executable, "-m", "titan_ckpt", *words], cwd=ROOT, check=True, stdout=sys.stderr)


def train(run: Path, ranks: int, *sets: str) -> None:
    """A job of the example."""
    sets = (
        f"train.steps={STEPS}",
        f"validation.every={STEPS}",
        "train.microbatch_size=32",
        "log.progress=false",
        *sets,
    )
    fixed = (f"save.url={run}", "train.device=cpu", "log.tensorboard=false")
    more = [part for text in (*fixed, *sets) for part in ("--set", text)]
    config, module = EXAMPLES / "vit_digits.toml", EXAMPLES / "vit_digits.py"
    command("train", str(config), "--module", str(module), "--nproc", str(ranks), *more)


def events(run: Path, event: str) -> dict[int, dict[str, Any]]:
    """A run's records of a kind, by step."""
    lines = (run / "logs" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if record["event"] == event}


def rows(folder: Path) -> list[Measurement]:
    """Train; reshard the checkpoint of the middle; resume from it; compare the two second halves."""
    first, second = folder / "first", folder / "second"
    train(first, 4, "mesh.dp_shard=2", "mesh.tp=2", f"save.every={HALF}")
    command("reshard", f"{first}@{HALF}", str(second), "--mesh", "dp_shard=4")
    train(second, 4, "mesh.dp_shard=4")
    bars = []
    for name, run in (("dp_shard=2,tp=2", first), ("resumed on dp_shard=4", second)):
        right = events(run, "validation")[STEPS]["accuracy"]
        what = f"held-out accuracy at step {STEPS}, {name}"
        bars.append(
            Measurement(what=what, figure=f"{right:.1%}", bar=f">= {ACCURACY_BAR:.0%}", holds=right >= ACCURACY_BAR)
        )
    losses, resumed = events(first, "step"), events(second, "step")
    apart = max(abs(resumed[step]["loss"] - losses[step]["loss"]) for step in range(HALF + 1, STEPS + 1))
    what = "largest absolute difference of losses after the reshard"
    bars.append(Measurement(what=what, figure=f"{apart:.1e}", bar=f"<= {LOSS_BAR:.0e}", holds=apart <= LOSS_BAR))
    return bars


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        bars = rows(Path(name))
    write_section("vision", TITLE, bars, NOTES)
    sys.exit(int(not all(bar.holds for bar in bars)))
