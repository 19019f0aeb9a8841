"""A seeded sample of the fuzzing campaign (`make fuzz`), and every input that it kept."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.fuzz import mutate
from tools.fuzz.blocks import Blocks
from tools.fuzz.campaign import run_campaign
from tools.fuzz.evidence import MAX_REPEATED, mutate_packed
from tools.fuzz.families import family
from tools.fuzz.family import MOST_BYTES
from tools.fuzz.hunt import CodeRunError, install_watch, problem_of
from tools.fuzz.names import FAMILIES
from tools.fuzz.plants import PLANTS
from tools.fuzz.scaling import is_faster_than_linear, shapes_of
from tools.paths import DATA, ROOT

KEPT = DATA / "fuzz"
SAMPLE = 60
SLACK = 8.0
"""Coverage and a slow machine make reading that much slower than the campaign allows."""
SLOW_SAMPLE = {"incident": 3, "torch_file": 25, "packed": 20, "sidecar": 25, "archive": 40}


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_and_kept_inputs_do_no_harm(name: str) -> None:
    fuzzed = family(name)
    kept = {path.name: path.read_bytes() for path in sorted((KEPT / name).glob("*"))}
    inputs = {**{f"seed {n}": data for n, data in enumerate(fuzzed.seeds())}, **kept}
    assert {what: problem for what, data in inputs.items() if (problem := problem_of(fuzzed, data, slack=SLACK))} == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sample_of_mutations_does_no_harm(name: str) -> None:
    fuzzed, rng = family(name), random.Random(f"1 {name}")
    seeds = list(fuzzed.seeds())
    for _ in range(SLOW_SAMPLE.get(name, SAMPLE)):
        data = fuzzed.mutate(rng, rng.choice(seeds), seeds)
        assert problem_of(fuzzed, data, slack=SLACK) is None, data[:2000]


def test_every_kept_input_belongs_to_a_family() -> None:
    assert {path.name for path in KEPT.iterdir()} <= set(FAMILIES)
    assert sum(path.stat().st_size for path in KEPT.rglob("*") if path.is_file()) < 1_000_000


def _problems_of_harm(folder: str) -> list[str | None]:
    """What a campaign says of readers that run a program, unpickle one, fail, and take long."""
    install_watch()

    def run(_: bytes) -> None:
        os.system(f"touch {folder}/file")

    readers: dict[Callable[[bytes], Any], bytes] = {
        run: b"",
        lambda data: pickle.loads(data): b"cos\nsystem\n.",  # noqa: S301
        lambda data: data[9]: b"",
        lambda _: sum(range(60_000_000)): b"",
    }
    return [problem_of(replace(family("settings"), read=reader), data) for reader, data in readers.items()]


def test_the_campaign_sees_each_kind_of_harm(tmp_path: Path) -> None:
    # In a process of its own: an audit hook stays, and before Python 3.12 breaks threads that start under coverage.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        run, unpickled, failed, slow = child.submit(_problems_of_harm, str(tmp_path)).result()
    assert run == f"{CodeRunError.__name__} test_fuzz.py:run"
    assert not (tmp_path / "file").exists()
    assert str(unpickled).startswith(CodeRunError.__name__)
    assert failed == "IndexError test_fuzz.py:<lambda>"
    assert str(slow).startswith("slow")


def test_memory_is_measured_for_each_input() -> None:
    fuzzed = replace(family("settings"), read=lambda data: b"x" * len(data), bound=lambda _: (40 << 20) - MOST_BYTES)
    large, small = bytes(90 << 20), bytes(10 << 20)
    found = [str(problem_of(fuzzed, data, slack=100)) for data in (large, small, large)]
    assert [problem.partition(" ")[0] for problem in found] == ["memory", "None", "memory"]


def test_blocks_count_how_often_they_are_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def f(n):\n    for i in range(n):\n        if i > 5:\n            i += 1\n"
    (tmp_path / "counted_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    blocks = Blocks(("counted_module",), lambda _, text: text.replace("i > 5", "i > 6"))
    blocks.install()
    module = importlib.import_module("counted_module")
    found = []
    for times in (0, 1, 1, 2, 3, 2, 7, 8):
        blocks.clear()
        module.f(times)
        found.append(blocks.is_new())
    assert found == [True, True, False, True, False, False, True, True]


def test_every_plant_changes_one_place_of_its_module() -> None:
    for plant in PLANTS:
        source = (ROOT / (plant.module.replace(".", "/") + ".py")).read_text()
        assert plant.change(plant.module, source) != source
        compile(plant.change(plant.module, source), plant.module, "exec")
    assert {plant.family for plant in PLANTS} >= set(FAMILIES) - {"sidecar"}


def test_fuzzing_finds_a_planted_fault(tmp_path: Path) -> None:
    number = next(n for n, plant in enumerate(PLANTS) if plant.family == "blob")
    found = run_campaign("blob", tmp_path, minutes=2, seed=1, plant=number)
    assert found.findings[0].startswith("KeyError_foreign_blob.py")


def test_what_grows_faster_than_linearly_is_found() -> None:
    assert is_faster_than_linear((0.01, 0.04, 0.16))
    assert not is_faster_than_linear((0.01, 0.02, 0.04))
    assert not is_faster_than_linear((0.0001, 0.0004, 0.0016))  # too short to tell


@pytest.mark.parametrize("name", ["safetensors", "box", "settings", "blob"])
def test_a_sample_of_shapes_is_read_in_linear_time(name: str) -> None:
    shapes = list(shapes_of(name))
    chosen = random.Random(f"1 {name}").sample(shapes, min(12, len(shapes)))
    fuzzed = family(name)
    assert {what: problem for what, make in chosen if (problem := problem_of(fuzzed, make(30_000), slack=SLACK))} == {}


def test_a_document_that_shares_its_lists_is_cut_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate, "MOST_BYTES", 10_000)
    shared: list[object] = [1]
    for _ in range(100):
        shared = [shared, shared, shared]
    assert len(mutate.json_text(shared)) == mutate.MOST_BYTES
    endless: list[object] = []
    endless += [endless] * 3000
    assert len(mutate.json_text(endless)) == mutate.MOST_BYTES
    plain = [[], ["a", 1.5, None, True, [2]], 7]
    assert json.loads(mutate.json_text(plain)) == plain


def test_repetitions_of_packed_files_do_not_grow_without_end() -> None:
    rng, data = random.Random(1), b"g" + bytes(MAX_REPEATED)
    assert max(len(mutate_packed(rng, data, [data])) for _ in range(40)) < 1 << 23
