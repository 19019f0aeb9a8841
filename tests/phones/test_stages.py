"""The stages on one rank: stopped in each of them, they go on from their checkpoints and find the same clusters."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.distributed.device_mesh import init_device_mesh

from examples.phones.choices import Choices
from examples.phones.pictures import Camera, pictures_in, read_truth, write_album
from examples.phones.progress import AXIS, Crew, Regroup
from examples.phones.score import adjusted_rand_index
from examples.phones.stages import Album, run_pipeline, weighted
from tests.phones.conftest import drawn_scene
from titan_ckpt import open_store
from titan_ckpt.errors import DataError

CHOICES = Choices(
    features="gradients",
    width=80,
    words=16,
    per_picture=40,
    iterations=6,
    tolerance=0.0,
    clusters=3,
    block=6,
    restarts=3,
)
pytestmark = pytest.mark.usefixtures("one_rank")


@dataclass(slots=True)
class Run:
    """Crews of one rank that work in a folder; what each of them reports."""

    folder: Path
    album: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def work(self, *, stop_in: str = "") -> list[int]:
        """The clusters; Regroup at the first save of the stage `stop_in`."""
        self.events = []
        crew = Crew(
            mesh=init_device_mesh("cpu", (1,), mesh_dim_names=(AXIS,)), save_every_s=0.0, report=self._report,
            open_store=lambda stage: open_store(str(self.folder / stage)),
            is_knocked=lambda: self.events[-1]["stage"] == stop_in,
        )  # fmt: skip
        album = Album(pictures=pictures_in(self.album), block=CHOICES.block)
        return run_pipeline(crew, album, CHOICES)

    def resumed(self) -> dict[str, int]:
        """The step at which each stage began."""
        return {event["stage"]: event["step"] for event in self.events if event["event"] == "resumed"}

    def _report(self, event: str, **details: Any) -> None:
        self.events.append({"event": event, **details})


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """18 photographs of three scenes."""
    folder = tmp_path_factory.mktemp("phones") / "few"
    write_album(folder, [drawn_scene(n) for n in (0, 2, 4)], count=18, seed=0, camera=Camera(width=160, height=120))
    return folder


@pytest.fixture(scope="module")
def undisturbed(few: Path, one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> list[int]:  # noqa: ARG001
    """The clusters of a run that nobody stops."""
    return Run(tmp_path_factory.mktemp("undisturbed"), few).work()


@pytest.mark.parametrize("stage", ["descriptors", "vocabulary", "vectors", "clusters"])
def test_a_stage_goes_on_where_it_was_stopped(stage: str, few: Path, undisturbed: list[int], tmp_path: Path) -> None:
    run = Run(tmp_path / "stopped", few)
    with pytest.raises(Regroup):
        run.work(stop_in=stage)
    assert run.work() == undisturbed
    assert run.resumed()[stage] == 1
    assert adjusted_rand_index(read_truth(few), undisturbed) > 0.5


def test_an_album_without_descriptors_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (160, 120), "gray").save(tmp_path / "flat.jpg")
    with pytest.raises(
        DataError, match="no picture drawn from the album has a descriptor: features gradients, width 80"
    ):
        Run(tmp_path / "run", tmp_path).work()


def test_few_descriptors_give_all_the_words(few: Path, tmp_path: Path) -> None:
    for number in range(8):
        Image.new("RGB", (160, 120), "gray").save(tmp_path / f"flat{number}.jpg")
    shutil.copy(pictures_in(few)[0], tmp_path)
    run = Run(tmp_path / "run", tmp_path)
    with pytest.raises(Regroup):
        run.work(stop_in="vocabulary")
    assert len(run.work()) == 9


def test_words_of_every_picture_weigh_nothing() -> None:
    vectors = weighted(torch.tensor([[1.0, 3.0, 0.0], [1.0, 0.0, 4.0], [1.0, 0.0, 0.0]]))
    assert vectors[:, 0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(vectors[:2, 1:], torch.eye(2))
