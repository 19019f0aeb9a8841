"""Draw the rooms as docs/images/architecture.svg: `python -m tools.architecture.picture`.

One lane per folder, one row per floor; a line leads from a room down to each room that it imports. Lines that follow from others
(a imports b, b imports c, so a imports c) are left out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tools.architecture.rooms import Drawing, read_drawing
from tools.paths import ROOT

PICTURE = ROOT / "docs" / "images" / "architecture.svg"
LANES = {  # folder: fill, line
    "debug": ("#fde8e4", "#b5483a"),
    "core": ("#e6eefb", "#35619f"),
    "converters": ("#e7f5e6", "#3f7f3a"),
    "trainer": ("#fff3d6", "#a06d10"),
    "tui": ("#f0e8fa", "#6f4aa5"),
}
FOLDERS = {"core": "titan_ckpt/"}
BOX_WIDTH, BOX_HEIGHT, GAP = 116, 30, 12
ROW, MARGIN, HEAD = 74, 20, 46
TITLES = {"converters.torchtitan_checkpoint": "torchtitan"}  # too long for a box


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The top left corner of a room's box, in pixels."""

    x: float
    y: float


def lane_of(room: str) -> str:
    """The folder that a room stands in; rooms of `titan_ckpt/` itself are the core."""
    folder, _, rest = room.partition(".")
    return folder if rest else "core"


def needed_arrows(drawing: Drawing) -> list[tuple[str, str]]:
    """The arrows that do not follow from others (the transitive reduction)."""
    below: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in below:
            below[room] = set(drawing.arrows[room]).union(*(reach(other) for other in drawing.arrows[room]))
        return below[room]

    return [
        (room, target)
        for room, targets in drawing.arrows.items()
        for target in targets
        if not any(target in reach(other) for other in targets if other != target)
    ]


def draw(drawing: Drawing) -> str:
    """The SVG document."""
    floors = drawing.floors()
    places, lanes, width = _places(floors)
    height = HEAD + ROW * len(floors) + MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
    ]
    for lane, (left, lane_width) in lanes.items():
        fill, colour = LANES[lane]
        parts.append(
            f'<rect x="{left:.0f}" y="8" width="{lane_width:.0f}" height="{height - 16}" rx="8" '
            f'fill="{fill}" fill-opacity="0.45"/>'
            f'<text x="{left + lane_width / 2:.0f}" y="30" text-anchor="middle" font-weight="bold" fill="{colour}">'
            f"{FOLDERS.get(lane, lane + '/')}</text>"
        )
    parts += [_line(places[room], places[target], LANES[lane_of(room)][1]) for room, target in needed_arrows(drawing)]
    parts += [_box(room, place) for room, place in places.items()]
    return "\n".join([*parts, "</svg>\n"])


def _places(floors: list[list[str]]) -> tuple[dict[str, Place], dict[str, tuple[float, float]], float]:
    """Each room's place, each lane's left edge and width, and the width of all."""
    rows: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for floor, rooms in enumerate(floors):
        for room in rooms:
            rows[lane_of(room)].setdefault(floor, []).append(room)
    places: dict[str, Place] = {}
    lanes: dict[str, tuple[float, float]] = {}
    left = float(MARGIN)
    for lane in LANES:
        most = max(len(rooms) for rooms in rows[lane].values())
        lane_width = most * (BOX_WIDTH + GAP) + GAP
        lanes[lane] = (left, float(lane_width))
        for floor, rooms in rows[lane].items():
            first = left + (lane_width - len(rooms) * (BOX_WIDTH + GAP) + GAP) / 2
            for n, room in enumerate(rooms):
                y = HEAD + ROW * (len(floors) - 1 - floor) + (ROW - BOX_HEIGHT) / 2
                places[room] = Place(x=first + n * (BOX_WIDTH + GAP), y=y)
        left += lane_width + GAP
    return places, lanes, left + MARGIN - GAP


def _line(upper: Place, lower: Place, colour: str) -> str:
    x1, y1 = upper.x + BOX_WIDTH / 2, upper.y + BOX_HEIGHT
    x2, y2 = lower.x + BOX_WIDTH / 2, lower.y
    bend = min(60.0, (y2 - y1) / 2)
    path = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.2" stroke-opacity="0.7"/>'


def _box(room: str, place: Place) -> str:
    fill, colour = LANES[lane_of(room)]
    title = TITLES.get(room, room.rpartition(".")[2])
    return (
        f'<rect x="{place.x:.0f}" y="{place.y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
        f'fill="{fill}" stroke="{colour}"><title>{room}</title></rect>'
        f'<text x="{place.x + BOX_WIDTH / 2:.0f}" y="{place.y + 20:.0f}" text-anchor="middle" fill="#222222">{title}</text>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(read_drawing()))
