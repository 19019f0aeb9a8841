"""Turn repeated names, sizes and call stacks into small integers while many dumps are read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from titan_ckpt.debug.incident.records import Frame, Group, Names

MAX_NAMES = 32_000  # op and dtypes are 16-bit columns
MAX_TEXT = 400
MAX_FRAMES = 128


class Table:
    """Distinct values in the order of their first use."""

    def __init__(self, first: Any, limit: int = 1 << 30) -> None:
        self.values: list[Any] = [first]
        self._positions: dict[Hashable, int] = {}
        self._limit = limit

    def find(self, key: Hashable) -> int | None:
        """Where the value with `key` stands, if it was added."""
        return self._positions.get(key)

    def add(self, key: Hashable, value: Any) -> int:
        """The position of `value`, adding it; 0 (the "unknown" value) when the table is full."""
        position = self._positions.get(key)
        if position is None:
            if len(self.values) >= self._limit:
                return 0
            position = self._positions[key] = len(self.values)
            self.values.append(value)
        return position


class Interner:
    """The tables of one run. Position 0 of each means "not known"."""

    def __init__(self) -> None:
        self.ops = Table("?", MAX_NAMES)
        self.sizes = Table("", 1 << 24)
        self.dtypes = Table("", MAX_NAMES)
        self.frames = Table((), 1 << 24)
        self._files: dict[str, str] = {}
        self._members: dict[Hashable, tuple[int, ...]] = {}
        self.groups: list[Group] = []
        self._groups: dict[Group, int] = {}

    def group(self, group: Group) -> int:
        """The position of `group` in Run.groups."""
        position = self._groups.get(group)
        if position is None:
            position = self._groups[group] = len(self.groups)
            self.groups.append(group)
        return position

    def members(self, ranks: Any, parse: Callable[[Any], tuple[int, ...]]) -> tuple[int, ...]:
        """`parse(ranks)`, once per distinct text or list: every dump spells all members out, which is the square of them."""
        key = tuple(ranks) if isinstance(ranks, list) else ranks
        try:
            known = self._members.get(key)
        except TypeError:  # not even hashable: not a list of ranks
            return parse(ranks)
        if known is None:
            known = self._members[key] = parse(ranks)
        return known

    def op(self, name: str) -> int:
        return self.ops.add(name, name[:MAX_TEXT])

    def size(self, shapes: Sequence[Sequence[int]]) -> int:
        """Shapes as `64x32, 8`; a scalar is `1`."""
        key = tuple(map(tuple, shapes))
        position = self.sizes.find(key)
        return self.sizes.add(key, shapes_text(key)) if position is None else position

    def dtype(self, names: Sequence[str]) -> int:
        key = tuple(names)
        position = self.dtypes.find(key)
        return self.dtypes.add(key, ", ".join(dict.fromkeys(key))[:MAX_TEXT]) if position is None else position

    def stack(self, frames: Sequence[Mapping[str, Any]]) -> int:
        """Frames as a dump holds them: most recent call first, with keys name, filename, line."""
        key = (*[frame["line"] for frame in frames], frames[0]["filename"], frames[-1]["filename"], frames[-1]["name"])
        position = self.frames.find(key)
        return self.frames.add(key, self._frames(frames)) if position is None else position

    def call_site(self, file: str, line: int, function: str) -> int:
        """A stack of which only one line is known."""
        if not file:
            return 0
        key = (file, line, function)
        position = self.frames.find(key)
        frame = Frame(file=file, line=line, function=function)
        return self.frames.add(key, (frame,)) if position is None else position

    def _frames(self, frames: Sequence[Mapping[str, Any]]) -> tuple[Frame, ...]:
        return tuple(
            Frame(
                file=self._files.setdefault(str(frame["filename"])[:MAX_TEXT], str(frame["filename"])[:MAX_TEXT]),
                line=int(frame["line"]),
                function=str(frame.get("name", ""))[:MAX_TEXT],
            )
            for frame in frames[:MAX_FRAMES]
        )

    def names(self) -> Names:
        """The finished tables."""
        return Names(
            ops=tuple(self.ops.values),
            sizes=tuple(self.sizes.values),
            dtypes=tuple(self.dtypes.values),
            frames=tuple(self.frames.values),
        )


def shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    """
    >>> shapes_text([[64, 32], [8], []])
    '64x32, 8, 1'
    """
    return ", ".join("x".join(str(int(n)) for n in shape[:16]) or "1" for shape in shapes[:64])
