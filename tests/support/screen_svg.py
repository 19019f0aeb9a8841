"""Terminal screens as one SVG sheet with a text element per line, so that a changed line is a one-line diff in git.

Textual's own SVG is ten times larger (an element per run of cells, a clip path per line, fonts). This sheet has the
same cells in the same colours and opens in any browser.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape, unescape
from itertools import groupby

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

CELL_W, CELL_H, FONT = 6, 12, 10
INK, PAPER = "#e0e0e0", "#121212"
_CSS = "text{white-space:pre}.b{font-weight:bold}.i{font-style:italic}.u{text-decoration:underline}.k{fill:#888}"
_PART = re.compile(r'<g id="(.*?)".*?>\n<text class="k".*?\n(.*?)</g>\n', re.DOTALL)
_Y = re.compile(r'<text y="(\d+)"')
_TAG = re.compile(r"<[^>]*>")


def sheet(screens: Mapping[str, Sequence[Strip]], size: tuple[int, int]) -> str:
    """All screens of a session, one below the other, each under the keys that led to it."""
    columns, lines = size
    step = (lines + 2) * CELL_H
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * CELL_W} {step * len(screens)}" '
        f'font-family="monospace" font-size="{FONT}" fill="{INK}">\n<style>{_CSS}</style>\n'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n'
    ]
    for number, (keys, strips) in enumerate(screens.items()):
        parts.append(f'<g id="{escape(keys)}" transform="translate(0,{number * step})">\n')
        parts.append(f'<text class="k" y="{FONT}">{escape(f"— {keys} —")}</text>\n')
        parts += [f"{line}\n" for line in (*_grounds(strips), *_texts(strips))]
        parts.append("</g>\n")
    return "".join([*parts, "</svg>\n"])


def _grounds(strips: Sequence[Strip]) -> Iterator[str]:
    """Non-default backgrounds, merged over adjacent lines."""
    places: dict[tuple[int, int, str], list[int]] = {}
    for y, strip in enumerate(strips, 1):
        x = 0
        for ground, same in groupby(strip, key=_ground):
            width = sum(len(segment.text) for segment in same)
            if ground != PAPER:
                places.setdefault((x, width, ground), []).append(y)
            x += width
    for (x, width, ground), lines in places.items():
        for _, run in groupby(enumerate(lines), key=lambda place: place[1] - place[0]):
            ys = [y for _, y in run]
            yield (
                f'<rect x="{x * CELL_W}" y="{ys[0] * CELL_H}" width="{width * CELL_W}" height="{len(ys) * CELL_H}" '
                f'fill="{ground}"/>'
            )


def _texts(strips: Sequence[Strip]) -> Iterator[str]:
    """Lines with text."""
    for y, strip in enumerate(strips, 1):
        length = len(strip.text.rstrip())
        if length:
            spans = "".join(_span(look, text) for look, text in _runs(strip, length))
            yield f'<text y="{y * CELL_H + FONT}" textLength="{length * CELL_W}">{spans}</text>'


def _runs(strip: Strip, length: int) -> Iterator[tuple[str, str]]:
    """(attributes, text) of the first `length` cells; blank segments take the attributes before them."""
    look, runs = "", []
    for segment in strip.crop(0, length):
        look = _look(segment.style or Style.null()) if segment.text.strip() else look
        runs.append((look, segment.text))
    for look, same in groupby(runs, key=lambda run: run[0]):
        yield look, "".join(text for _, text in same)


def _span(look: str, text: str) -> str:
    return f"<tspan{look}>{escape(text, quote=False)}</tspan>" if look else escape(text, quote=False)


def _look(style: Style) -> str:
    """Colour and text style as attributes."""
    ink = style.bgcolor if style.reverse else style.color
    name = ink.get_truecolor().hex if ink and not ink.is_default else PAPER if style.reverse else INK
    marks = [mark for mark, on in zip("biu", (style.bold, style.italic, style.underline), strict=True) if on]
    return (f' fill="{name}"' if name != INK else "") + (f' class="{" ".join(marks)}"' if marks else "")


def _ground(segment: Segment) -> str:
    style = segment.style or Style.null()
    ground = style.color if style.reverse else style.bgcolor
    return ground.get_truecolor().hex if ground and not ground.is_default else INK if style.reverse else PAPER


def difference(before: str, now: str) -> list[str]:
    """Describe how two sheets differ: texts of lines, colours, backgrounds."""
    old, new = dict(_parts(before)), dict(_parts(now))
    found = [f"after the keys {keys!r}: a new screen without a picture" for keys in new if keys not in old]
    found += [f"after the keys {keys!r}: this screen is no longer shown" for keys in old if keys not in new]
    for keys in [keys for keys in old if keys in new]:
        places = sorted(old[keys].keys() | new[keys].keys())
        pairs = [(place, old[keys].get(place, ""), new[keys].get(place, "")) for place in places]
        found += [f"after the keys {keys!r}, {_change_text(place, a, b)}" for place, a, b in pairs if a != b]
    return found


def _parts(svg: str) -> Iterator[tuple[str, dict[int, str]]]:
    """Lines of each screen by number, from 1; backgrounds are line 0."""
    for keys, body in _PART.findall(svg):
        lines: dict[int, str] = {}
        for line in body.splitlines():
            y = _Y.match(line)
            number = (int(y.group(1)) - FONT) // CELL_H if y else 0
            lines[number] = lines.get(number, "") + line
        yield unescape(keys), lines


def _change_text(number: int, a: str, b: str) -> str:
    """Describe two different lines by their texts, or by their elements if the texts are equal."""
    was, now = (unescape(_TAG.sub("", line)) for line in (a, b))
    where = f"line {number}" if number else "backgrounds"
    if was == now:
        where, was, now = f"{where} (its colours)" if number else where, _Y.sub("<text", a), _Y.sub("<text", b)
    return f"{where}:\n    was: {was}\n    now: {now}"
