"""Classes of the zoo's own, at module level, where pickles find them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class Level(enum.IntFlag):
    LOW, HIGH = 1, 2


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Settings:
    lr: float = 0.1
    names: list[str] = field(default_factory=list)


class Counterlike:
    """A loader: its state has other entries after its first step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "workers": [{"seed": n} for n in range(self.at)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] if len(state["workers"]) == state["at"] else -1
