"""The imports match the rooms that pyproject.toml defines, and an import without an arrow is rejected."""

from __future__ import annotations

import ast
import copy
from functools import cache

import grimp
import pytest
from grimp import ImportGraph

from tools.architecture.contract import ArrowsContract
from tools.architecture.picture import PICTURE, draw
from tools.architecture.rooms import Drawing, parse_drawing, read_drawing
from tools.paths import ROOT

DRAWING = read_drawing()
CORE = {room for room in DRAWING.arrows if "." not in room} - {
    "integrations",
    "demo",
}  # which use the core, as the trainer does


@cache
def graph() -> ImportGraph:
    return grimp.build_graph("titan_ckpt", exclude_type_checking_imports=True)


def contract(drawing: Drawing) -> ArrowsContract:
    named = [f"{room}: {', '.join(modules)}" for room, modules in drawing.named.items()]
    arrows = [f"{room} -> {', '.join(below)}" for room, below in drawing.arrows.items()]
    return ArrowsContract("Arrows", {}, {"rooms": named, "arrows": arrows})


def module_of(room: str) -> str:
    return next(module for module in sorted(graph().modules, reverse=True) if DRAWING.room_of(module) == room)


def test_the_drawing_is_what_the_code_imports() -> None:
    check = contract(DRAWING).check(graph(), verbose=False)
    assert check.kept, check.metadata


@pytest.mark.parametrize("room", DRAWING.arrows)
def test_an_import_without_an_arrow_is_refused(room: str) -> None:
    forbidden = next(other for other in DRAWING.arrows if other != room and other not in DRAWING.arrows[room])
    planted = copy.deepcopy(graph())
    planted.add_import(
        importer=module_of(room), imported=module_of(forbidden), line_number=1, line_contents="import planted"
    )
    check = contract(DRAWING).check(planted, verbose=False)
    assert check.metadata["forbidden"] == [f"{module_of(room)} -> {module_of(forbidden)} (l.1)"]


def test_an_arrow_that_no_import_needs_is_refused() -> None:
    more = parse_drawing([], [f"{room} -> {', '.join(below)}" for room, below in DRAWING.arrows.items()])
    arrows = dict(more.arrows) | {"console": ("base", "store")}
    check = contract(Drawing(named=DRAWING.named, arrows=arrows)).check(graph(), verbose=False)
    assert check.metadata["unused"] == ["console -> store"]


def test_a_module_outside_every_room_is_refused() -> None:
    planted = copy.deepcopy(graph())
    planted.add_module("titan_ckpt.attic")
    assert contract(DRAWING).check(planted, verbose=False).metadata["homeless"] == ["titan_ckpt.attic"]


def test_a_facade_imported_from_a_room_is_refused() -> None:
    planted = copy.deepcopy(graph())
    planted.add_import(importer="titan_ckpt.tui.app", imported="titan_ckpt.debug", line_number=1, line_contents="x")
    found = contract(DRAWING).check(planted, verbose=False).metadata["through_facades"]
    assert found == ["titan_ckpt.tui.app -> titan_ckpt.debug"]


def test_a_circle_of_rooms_is_an_error() -> None:
    with pytest.raises(ValueError, match="a circle of rooms: a -> b -> a"):
        parse_drawing([], ["a -> b", "b -> a"]).floors()


def test_the_core_has_at_most_70_arrows_between_its_rooms() -> None:
    assert sum(below in CORE for room in CORE for below in DRAWING.arrows[room]) <= 70


def test_the_picture_is_drawn_from_the_contract() -> None:
    assert PICTURE.read_text() == draw(DRAWING), "run `python -m tools.architecture.picture`"


def test_the_design_page_lists_every_room() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    missing = [room for room in DRAWING.arrows if f"| `{room.rpartition('.')[2]}`" not in page]
    assert missing == []


def test_each_room_describes_itself() -> None:
    silent = []
    for room in DRAWING.arrows:
        path = ROOT / (room if "." in room else f"titan_ckpt/{room}").replace(".", "/")
        if path.is_dir() and not ast.get_docstring(ast.parse((path / "__init__.py").read_text())):
            silent.append(room)
    assert silent == []
