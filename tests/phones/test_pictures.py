"""Photographs and their descriptors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.phones.features import CELLS, grid_gradients
from examples.phones.pictures import (
    Camera,
    open_gray,
    photograph_path,
    pictures_in,
    read_truth,
    take_photograph,
    write_album,
)
from tests.phones.conftest import NUM_SCENES, drawn_scene
from titan_ckpt.errors import DataError

STILL = Camera(corner_shift=0.0, tilt_degrees=0.0, smallest_crop=1.0, light=(1.0, 1.0))


def test_a_camera_that_holds_still_sees_the_scene() -> None:
    scene = drawn_scene(0)
    seen, _ = take_photograph(scene, STILL, np.random.default_rng(0))
    assert np.abs(np.asarray(seen, dtype=int) - np.asarray(scene, dtype=int)).max() <= 1


def test_an_album_depends_on_its_seed_alone(album: Path, tmp_path: Path) -> None:
    scenes = [drawn_scene(seed) for seed in range(NUM_SCENES)]
    write_album(tmp_path, scenes, count=6, seed=0, camera=Camera(width=160, height=120))
    write_album(tmp_path / "other", scenes, count=6, seed=1, camera=Camera(width=160, height=120))
    first = [photograph_path(folder, 0).read_bytes() for folder in (tmp_path, tmp_path / "other")]
    assert first[0] != first[1]
    assert sorted(read_truth(tmp_path)) == list(range(NUM_SCENES))
    assert len(read_truth(album)) == 60


def test_pictures_open_at_the_width_asked_for(album: Path) -> None:
    picture = open_gray(photograph_path(album, 0), 80)
    assert picture.shape == (60, 80)
    assert 0 <= picture.min() < picture.max() <= 1


def test_half_a_picture_is_named(album: Path, tmp_path: Path) -> None:
    (tmp_path / "half.jpg").write_bytes(photograph_path(album, 0).read_bytes()[:2000])
    assert pictures_in(tmp_path) == [tmp_path / "half.jpg"]
    with pytest.raises(DataError, match=r"half\.jpg: cannot be read as a picture: image file is truncated"):
        open_gray(tmp_path / "half.jpg", 80)


def test_a_picture_smaller_than_a_descriptor_has_none() -> None:
    assert grid_gradients(np.ones((15, 80), np.float32)).shape == (0, 128)


def test_a_flat_picture_has_no_descriptors() -> None:
    assert grid_gradients(np.full((64, 80), 0.5, np.float32)).shape == (0, 128)


def test_descriptors_do_not_depend_on_the_light(album: Path) -> None:
    picture = open_gray(photograph_path(album, 1), 160)
    bright, more = grid_gradients(picture), grid_gradients(picture * np.float32(1.5) + np.float32(0.1))
    assert bright.shape[1] == 128
    assert len(bright) <= len(more)  # no patch loses its contrast
    distances = np.abs(more.astype(int)[None] - bright.astype(int)[:, None]).max(2)
    assert (distances.min(1) <= 1).all()


def test_a_gradient_falls_into_its_direction() -> None:
    ramp = np.tile(
        np.linspace(0, 4, 16, dtype=np.float32), (16, 1)
    )  # brighter to the right: direction 0 of 8 in every cell
    (row,) = grid_gradients(ramp)
    assert set(np.flatnonzero(row) // (CELLS * CELLS)) == {0}
