"""An album of photographs: scenes from installed packages, each seen from many sides, in many lights, as JPEG files.

    python -m examples.phones.pictures ALBUM --count 1000 --seed 0

Photograph `i` depends on the scenes, the seed and `i` alone. `truth.json` holds the number of each photograph's scene; only the
measurement of quality reads it, so any folder of JPEG files is an album.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance

from titan_ckpt.errors import DataError

Gray = NDArray[np.float32]
"""A picture, height by width, from 0 to 1."""

SCENES = (
    "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "clock_motion.png", "coffee.png", "coins.png",
    "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "microaneurysms.png", "moon.png", "motorcycle_left.png",
    "page.png", "retina.jpg", "rocket.jpg", "text.png",
)  # fmt: skip
TRUTH = "truth.json"
SUFFIXES = {".jpg", ".jpeg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Camera:
    """How far photographs of one scene differ; lengths are parts of the picture's width or height."""

    width: int = 320
    height: int = 240
    corner_shift: float = 0.06
    tilt_degrees: float = 8.0
    smallest_crop: float = 0.75
    light: tuple[float, float] = (0.6, 1.4)
    quality: tuple[int, int] = (40, 90)


def installed_scenes() -> list[Image.Image]:
    """The pictures that scikit-image and scikit-learn bring in their packages; nothing is downloaded."""
    import skimage.data  # of the extra `examples`
    import sklearn.datasets

    folder = Path(skimage.data.__file__).parent
    scenes = [Image.open(folder / name).convert("RGB") for name in SCENES]
    return scenes + [Image.fromarray(picture) for picture in sklearn.datasets.load_sample_images().images]


def write_album(folder: Path, scenes: Sequence[Image.Image], *, count: int, seed: int, camera: Camera) -> None:
    """`count` JPEG files, the scenes in a random order, and the truth."""
    folder.mkdir(parents=True, exist_ok=True)
    truth = np.random.default_rng(seed).permutation(np.arange(count) % len(scenes))
    for number, scene in enumerate(truth):
        random = np.random.default_rng([seed, number])
        photograph, quality = take_photograph(scenes[scene], camera, random)
        photograph.save(photograph_path(folder, number), quality=quality)
    (folder / TRUTH).write_text(json.dumps(truth.tolist()))


def take_photograph(scene: Image.Image, camera: Camera, random: np.random.Generator) -> tuple[Image.Image, int]:
    """A part of the scene through a homography, in another light, and the quality of its JPEG file."""
    size = (camera.width, camera.height)
    corners = _corners_in_scene(camera, random) * np.array(scene.size)
    seen = scene.transform(
        size,
        Image.Transform.PERSPECTIVE,
        _homography(corners, size),
        Image.Resampling.BICUBIC,
        fillcolor=(128, 128, 128),
    )
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        seen = change(seen).enhance(random.uniform(*camera.light))
    return seen, int(random.integers(*camera.quality))


def photograph_path(folder: Path, number: int) -> Path:
    """The file of a photograph."""
    return folder / f"{number:05}.jpg"


def pictures_in(folder: Path) -> list[Path]:
    """The JPEG files of an album by name, hidden ones aside; DataError if there are none, or one is no picture."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")
    except OSError as error:
        raise DataError(f"album {folder}: cannot be read: {error.strerror}") from error
    if not files:
        raise DataError(f"album {folder}: has no JPEG file (.jpg or .jpeg)")
    for path in files:
        with _readable(path), Image.open(path):
            pass
    return files


def open_gray(path: Path, width: int) -> Gray:
    """A photograph without colour, scaled to `width` pixels. The decoder itself skips what a smaller picture does not need."""
    with _readable(path), Image.open(path) as picture:
        height = max(1, round(picture.height * width / picture.width))
        picture.draft("L", (width, height))
        gray = picture.convert("L")
    if gray.size != (width, height):
        gray = gray.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(gray, dtype=np.float32) / np.float32(255)


def read_truth(folder: Path) -> list[int]:
    """The scene of each photograph of an album that was made here."""
    truth: list[int] = json.loads((folder / TRUTH).read_text())
    return truth


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """DataError that names the file if it cannot be read as a picture."""
    try:
        yield
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path}: cannot be read as a picture: {error}. Replace it, or take it out of the album"
        ) from error


def _corners_in_scene(camera: Camera, random: np.random.Generator) -> NDArray[np.float64]:
    """Where the photograph's corners (upper left, upper right, lower right, lower left) lie in the scene; 4 x 2, from 0 to 1."""
    side = random.uniform(camera.smallest_crop, 1.0)
    centre: NDArray[np.float64] = 0.5 + random.uniform(-0.5, 0.5, 2) * (1 - side)
    angle = np.radians(random.uniform(-camera.tilt_degrees, camera.tilt_degrees))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    square = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * side / 2
    shift: NDArray[np.float64] = random.uniform(-camera.corner_shift, camera.corner_shift, (4, 2))
    corners: NDArray[np.float64] = shift + centre + square @ turn.T
    return corners


def _homography(corners: NDArray[np.float64], size: tuple[int, int]) -> list[float]:
    """The eight numbers (a..h) of x' = (ax + by + c) / (gx + hy + 1), y' = (dx + ey + f) / (gx + hy + 1), photograph to scene."""
    width, height = size
    rows, right = [], []
    for (x, y), (u, v) in zip([(0, 0), (width, 0), (width, height), (0, height)], corners, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        right += [u, v]
    return [float(value) for value in np.linalg.solve(np.array(rows, dtype=np.float64), np.array(right))]


def main() -> None:
    """Write an album."""
    parser = argparse.ArgumentParser(description="write an album of photographs of the scenes that ship in packages")
    parser.add_argument("album", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_album(options.album, installed_scenes(), count=options.count, seed=options.seed, camera=Camera())


if __name__ == "__main__":
    main()
