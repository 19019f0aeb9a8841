"""An import-linter contract: rooms import only along the arrows that pyproject.toml draws, and every arrow drawn is needed."""

from __future__ import annotations

from typing import Any, cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output

from tools.architecture.rooms import PACKAGE, parse_drawing


class ArrowsContract(Contract):
    """`rooms`: lines `base: errors, location` for rooms of several modules. `arrows`: lines `store -> base`, one per room."""

    type_name = "arrows"
    rooms = fields.ListField(subfield=fields.StringField())
    arrows = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Broken by an import without an arrow, an arrow without an import, a module without a room, a circle."""
        drawing = parse_drawing(cast(Any, self.rooms), cast(Any, self.arrows))
        drawing.floors()
        found = drawing.imports_of(graph)
        drawn = {(room, below) for room, belows in drawing.arrows.items() for below in belows}
        facades = {PACKAGE, *(f"{PACKAGE}.{room.partition('.')[0]}" for room in drawing.arrows if "." in room)}
        homeless = [
            module
            for module in sorted(graph.modules)
            if module.startswith(PACKAGE) and module not in facades and drawing.room_of(module) is None
        ]
        through_facades = [
            f"{module} -> {facade}"
            for facade in sorted(facades & graph.modules)
            for module in sorted(graph.find_modules_that_directly_import(facade))
            if drawing.room_of(module) is not None
        ]
        metadata: dict[str, Any] = {
            "forbidden": [str(i) for pair, imports in found.items() if pair not in drawn for i in imports],
            "unused": [f"{room} -> {below}" for room, below in sorted(drawn - found.keys())],
            "homeless": homeless,
            "through_facades": through_facades,
        }
        return ContractCheck(kept=not any(metadata.values()), metadata=metadata)

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Each violation on a line."""
        titles = {
            "forbidden": "Imports between rooms that have no arrow in pyproject.toml:",
            "unused": "Arrows in pyproject.toml that no import needs:",
            "homeless": "Modules that are in no room:",
            "through_facades": "Imports of a package's facade from a room (import the module that defines the name):",
        }
        for key, title in titles.items():
            if check.metadata[key]:
                output.print_error(title)
                for line in check.metadata[key]:
                    output.print_error(f"- {line}", bold=False)
                output.new_line()
