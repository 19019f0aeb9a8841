"""What a peer is started with, and what its two processes tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.phones.choices import Choices

DONE, AGAIN, FAILED, UNFIT = 0, 10, 11, 12  # how the work of a crew ends; unfit: this peer cannot go on, others can
LABELS, FILES = "labels.json", "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a peer is started with."""

    address: str
    book: tuple[str, ...]
    home: Path
    pictures: tuple[Path, ...]
    choices: Choices
    save_every_s: float
    timeout_s: float
    look_every_s: float
    task: dict[str, Any]
