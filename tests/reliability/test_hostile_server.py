"""Whole jobs against an S3 server that answers wrongly: a seeded sample of `scripts/hostile.py server`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from titan_ckpt.check.verify import verify
from titan_ckpt.errors import CheckpointError, StoreError
from tools.hostile.memory_s3 import Answer
from tools.hostile.s3_jobs import RUN, Jobs, hostile_jobs
from tools.hostile.s3_server import always, honest, once
from tools.hostile.s3_shapes import SHAPES, Shape

NAMES = [
    "save",
    "load",
    "ls",
    "inspect",
    "verify --data",
    "cp",
    "prune",
    "prune --incomplete",
    "reshard",
    "to-hf",
    "diff",
]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with hostile_jobs() as found:
        yield found


@pytest.fixture(autouse=True)
def _key(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of now: every job gets another one, so that late requests of the job before are known."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", jobs.server.options["access_key"])


def test_the_sample_has_every_job(jobs: Jobs) -> None:
    assert [job.name for job in jobs.all] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_anywhere_harms_no_checkpoint(jobs: Jobs, name: str) -> None:
    job = next(job for job in jobs.all if job.name == name)
    rng, num_requests, reached = random.Random(f"3-{name}"), jobs.count(job), 0
    shapes = rng.sample([shape for shape in SHAPES.values() if not shape.is_slow and not shape.operations], 5)
    for shape in shapes:
        number = rng.randint(1, num_requests)
        seen = jobs.run(job, once(shape, number))
        assert seen.problem == "", f"{shape.name} at request {number}"
        reached += seen.outcome != "not reached"
    assert reached >= 4


def test_verify_never_says_whole_of_bytes_it_did_not_get(jobs: Jobs) -> None:
    """The objects are damaged, and the server hides it from all but honest reads."""
    jobs.server.memory.replace_all(jobs.start)
    name = next(key for key in jobs.start if key.endswith(".distcp") and key.startswith("run/step-00000003/"))
    whole = jobs.start[name]
    jobs.server.memory.put(name, whole[: len(whole) // 2] + b"\xff\xfe\xfd" + whole[len(whole) // 2 + 3 :])
    jobs.server.rule = honest
    assert verify(f"{RUN}@3", read_data=True) != []

    def cut(_: object, answer: Answer) -> Answer:
        return Answer(answer.status, answer.headers, answer.body[: len(answer.body) // 2], "cut")

    jobs.server.rule = always(Shape(name="half", make=cut, operations=frozenset({"GetObject"})))
    try:
        problems = [str(problem) for problem in verify(f"{RUN}@3", read_data=True)]
    except (CheckpointError, StoreError) as error:
        problems = [str(error)]
    assert problems
