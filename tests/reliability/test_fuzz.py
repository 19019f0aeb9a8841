"""A seeded sample of the fuzzing campaign (`make fuzz`), and every input that it kept."""

from __future__ import annotations

import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tools.fuzz.families import family
from tools.fuzz.hunt import CodeRunError, install_watch, problem_of
from tools.fuzz.names import FAMILIES
from tools.paths import DATA

KEPT = DATA / "fuzz"
SAMPLE = 60
SLOW_SAMPLE = {"incident": 3, "torch_file": 25, "packed": 20, "sidecar": 25}


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_and_kept_inputs_do_no_harm(name: str) -> None:
    fuzzed = family(name)
    kept = {path.name: path.read_bytes() for path in sorted((KEPT / name).glob("*"))}
    inputs = {**{f"seed {n}": data for n, data in enumerate(fuzzed.seeds())}, **kept}
    assert {what: problem for what, data in inputs.items() if (problem := problem_of(fuzzed, data))} == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_of_mutations_does_no_harm(name: str) -> None:
    fuzzed, rng = family(name), random.Random(f"1 {name}")
    seeds = list(fuzzed.seeds())
    for _ in range(SLOW_SAMPLE.get(name, SAMPLE)):
        data = fuzzed.mutate(rng, rng.choice(seeds), seeds)
        assert problem_of(fuzzed, data) is None, data[:2000]


def test_every_kept_input_belongs_to_a_family() -> None:
    assert {path.name for path in KEPT.iterdir()} <= set(FAMILIES)
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 1_000_000


def test_the_campaign_sees_each_kind_of_harm(tmp_path: Path) -> None:
    install_watch()
    fuzzed = family("settings")

    def run(_: bytes) -> None:
        os.system(f"touch {tmp_path}/file")

    assert problem_of(replace(fuzzed, read=run), b"") == f"{CodeRunError.__name__} test_fuzz.py:run"
    assert not (tmp_path / "file").exists()
    found = problem_of(replace(fuzzed, read=lambda data: pickle.loads(data)), b"cos\nsystem\n.")  # noqa: S301
    assert str(found).startswith(CodeRunError.__name__)
    assert problem_of(replace(fuzzed, read=lambda data: data[9]), b"") == "IndexError test_fuzz.py:<lambda>"
    assert str(problem_of(replace(fuzzed, read=lambda _: sum(range(200_000_000))), b"")).startswith("slow")
