"""Where the user was: back, and forward again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A screen, what is selected there, and the line of its cursor."""

    screen: int
    lane: int
    seq: int | None
    cursor: int


class History:
    """Places before and after the current one."""

    def __init__(self) -> None:
        self._back: list[Place] = []
        self._forward: list[Place] = []

    def leave(self, here: Place) -> None:
        """Go on from `here` to a new place."""
        self._back.append(here)
        self._forward.clear()

    def back(self, here: Place) -> Place | None:
        """The place before; None at the first."""
        if not self._back:
            return None
        self._forward.append(here)
        return self._back.pop()

    def forward(self, here: Place) -> Place | None:
        """The place that `back` left; None at the last."""
        if not self._forward:
            return None
        self._back.append(here)
        return self._forward.pop()
