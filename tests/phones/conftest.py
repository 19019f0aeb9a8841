"""An album of drawn scenes, and a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image

from examples.phones.pictures import Camera, write_album

NUM_SCENES = 6


def drawn_scene(number: int) -> Image.Image:
    """Stripes, in a direction of the scene's own, and a little noise."""
    rows, columns = np.mgrid[:240, :320]
    angle = np.pi * number / NUM_SCENES
    stripes = np.sin((columns * np.cos(angle) + rows * np.sin(angle)) * (0.15 + 0.02 * number))
    noise = np.random.default_rng(number).normal(0, 8, (240, 320))
    gray = np.clip(128 + 90 * stripes + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(gray).convert("RGB")


@pytest.fixture(scope="session")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 photographs of six scenes."""
    folder = tmp_path_factory.mktemp("phones") / "album"
    scenes = [drawn_scene(seed) for seed in range(NUM_SCENES)]
    write_album(folder, scenes, count=60, seed=0, camera=Camera(width=160, height=120))
    return folder


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
