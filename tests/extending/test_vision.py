"""The vision example on scikit-learn's digits: trained, resharded and resumed, it reads digits that it has not seen."""

from __future__ import annotations

from pathlib import Path

from tests.support.training_runs import read_events
from titan_ckpt.cli.main import main
from tools.paths import EXAMPLES

ACCURACY = 0.85  # of guesses by chance, a tenth are right


def _train(run: Path, *sets: str) -> int:
    fixed = (f"save.url={run}", "train.device=cpu", "train.microbatch_size=64", "log.tensorboard=false")
    more = [part for text in (*fixed, "log.progress=false", *sets) for part in ("--set", text)]
    return main(["train", str(EXAMPLES / "vit_digits.toml"), "--module", str(EXAMPLES / "vit_digits.py"), *more])


def test_a_vision_transformer_reads_digits_after_a_reshard(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert _train(first, "train.steps=20", "validation.every=20") == 0
    assert main(["reshard", str(first), str(second), "--mesh", "dp_shard=4"]) == 0
    assert _train(second, "train.steps=60", "validation.every=60") == 0
    (before,), (after,) = (read_events(run, "validation") for run in (first, second))
    assert (before["step"], after["step"], after["tokens"]) == (20, 60, 359)
    assert after["accuracy"] >= ACCURACY
    assert after["accuracy"] > before["accuracy"]
