"""The drawing of the rooms in pyproject.toml, and the imports that the code really has between them.

A room is a sub-package or a few modules. The drawing gives each room the rooms it may import; "base: errors, location" gives a
room of several modules its name.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from grimp import ImportGraph

from tools.paths import ROOT

PACKAGE = "titan_ckpt"
CONTRACT = "arrows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One import statement between two rooms."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported} (l.{self.line})"


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """`named`: rooms made of several modules. `arrows`: the rooms that each room may import. Names leave out `titan_ckpt.`."""

    named: Mapping[str, Sequence[str]]
    arrows: Mapping[str, Sequence[str]]

    @cached_property
    def _room_of_prefix(self) -> dict[str, str]:
        members = {module: room for room, modules in self.named.items() for module in modules}
        return members | {room: room for room in self.arrows if room not in self.named}

    def room_of(self, module: str) -> str | None:
        """The room of a module (`titan_ckpt.store.s3` -> `store`), None for a module outside every room."""
        package, *parts = module.split(".")
        if package != PACKAGE:
            return None
        for end in range(len(parts), 0, -1):
            if (room := self._room_of_prefix.get(".".join(parts[:end]))) is not None:
                return room
        return None

    def imports_of(self, graph: ImportGraph) -> dict[tuple[str, str], list[Import]]:
        """The import statements between rooms, by the pair (importing room, imported room)."""
        found: dict[tuple[str, str], list[Import]] = defaultdict(list)
        for module in sorted(graph.modules):
            if (room := self.room_of(module)) is None:
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                if (other := self.room_of(imported)) not in (None, room):
                    details = graph.get_import_details(importer=module, imported=imported)
                    found[room, str(other)] += [
                        Import(importer=module, imported=imported, line=d["line_number"]) for d in details
                    ]
        return dict(found)

    def floors(self) -> list[list[str]]:
        """The rooms by floor, ground floor first: a room stands one floor above the highest room that it imports."""
        floor: dict[str, int] = {}

        def place(room: str, path: tuple[str, ...]) -> int:
            if room in path:
                raise ValueError(f"a circle of rooms: {' -> '.join([*path[path.index(room) :], room])}")
            if room not in floor:
                floor[room] = 1 + max((place(below, (*path, room)) for below in self.arrows[room]), default=-1)
            return floor[room]

        for room in self.arrows:
            place(room, ())
        return [[room for room in self.arrows if floor[room] == n] for n in range(max(floor.values()) + 1)]


def parse_drawing(named: Sequence[str], arrows: Sequence[str]) -> Drawing:
    """From lines `base: errors, location` and `store -> base`.

    >>> parse_drawing(["base: errors, location"], ["base ->", "store -> base"]).arrows
    {'base': (), 'store': ('base',)}
    """
    return Drawing(
        named={name.strip(): _names(rest) for name, _, rest in (line.partition(":") for line in named)},
        arrows={name.strip(): _names(rest) for name, _, rest in (line.partition("->") for line in arrows)},
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def read_drawing(project_file: Path = ROOT / "pyproject.toml") -> Drawing:
    """The drawing that `make check` holds."""
    contracts = tomllib.loads(project_file.read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == CONTRACT)
    return parse_drawing(contract["rooms"], contract["arrows"])
