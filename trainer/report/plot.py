"""`titan-ckpt plot RUN`: loss, throughput and checkpoints of a run as one SVG, from its `metrics.jsonl`. No torch.

The SVG is written by hand: three line charts do not justify a plotting library in the laptop install.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, log10
from xml.sax.saxutils import escape

from titan_ckpt.console.command import Command
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.console.picture import add_force_flag, write_picture
from titan_ckpt.errors import NotFoundError, UsageError
from titan_ckpt.format.names import LOGS
from titan_ckpt.location import join, parse_location, redact
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.report.goodput import goodput
from titan_ckpt.trainer.report.records import METRICS, Event, MetricsRecord, last_run, parse_records

WIDTH, PANEL, LEFT, RIGHT, GAP = 900, 190, 80, 20, 46
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37")
MAX_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve over steps."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    is_dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart; vertical lines mark saves (`marks`) and resumptions (`breaks`), in steps."""

    title: str
    lines: list[Line]
    marks: list[float] = field(default_factory=list)
    breaks: list[float] = field(default_factory=list)


def run_panels(records: Sequence[MetricsRecord]) -> list[Panel]:
    """Three panels: training and validation loss, tokens per second, and the stalls and commits of checkpoints."""
    steps = [record for record in records if record["event"] == Event.STEP]

    def curve(value: Callable[[MetricsRecord], float | None]) -> list[tuple[float, float]]:
        found = [(float(record["step"]), value(record)) for record in steps]
        return [(x, float(y)) for x, y in found if y is not None]

    validation = [
        (float(r["step"]), float(r["loss"]))
        for r in records
        if r["event"] == Event.VALIDATION and r.get("loss") is not None and "set" not in r
    ]
    stalls = [(float(r["step"]), 1000.0 * float(r["stall_s"])) for r in records if r["event"] == Event.SAVE]
    breaks = [float(r["step"]) for r in records if r["event"] == Event.START and r["step"]]
    ages = curve(lambda r: r["step"] - r["committed_step"] if r.get("committed_step") is not None else None)
    loss = [Line(name="training loss", points=curve(lambda r: r.get("loss")), colour=COLOURS[0])]
    if validation:
        loss.append(Line(name="validation loss", points=validation, colour=COLOURS[1], is_dots=True))
    speed = [Line(name="tokens/s", points=curve(lambda r: r.get("tokens_per_s")), colour=COLOURS[2])]
    saves = [
        Line(name="stall of a save, ms", points=stalls, colour=COLOURS[1], is_dots=True),
        Line(name="steps since the newest commit", points=ages, colour=COLOURS[0]),
    ]
    marks = [x for x, _ in stalls]
    return [
        Panel(title="loss", lines=loss, breaks=breaks),
        Panel(title="throughput", lines=speed, marks=marks, breaks=breaks),
        Panel(title="checkpoints", lines=saves, marks=marks, breaks=breaks),
    ]


def draw_svg(title: str, subtitle: str, charts: Sequence[Panel]) -> str:
    """The SVG. Grey dashes are saves, red dashes resumptions after an interruption."""
    height = 70 + len(charts) * (PANEL + GAP)
    end = max((x for chart in charts for line in chart.lines for x, _ in line.points), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>',
        f'<text x="{LEFT}" y="44" fill="#57606a">{escape(subtitle)}</text>',
    ]
    for number, chart in enumerate(charts):
        parts += _draw_panel(chart, 64 + number * (PANEL + GAP), end)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _draw_panel(chart: Panel, top: float, end: float) -> list[str]:
    values = [y for line in chart.lines for _, y in line.points]
    ticks = nice_ticks(min(values, default=0.0), max(values, default=1.0))
    low, high = ticks[0], ticks[-1]

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(end, 1.0)

    def y_of(value: float) -> float:
        return top + PANEL - PANEL * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        parts.append(
            f'<path d="M{LEFT} {y_of(tick):.1f}H{WIDTH - RIGHT}" stroke="#d0d7de"/>'
            f'<text x="{LEFT - 8}" y="{y_of(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>'
        )
    for tick in nice_ticks(0.0, end):
        if tick <= end:
            parts.append(f'<text x="{x_of(tick):.1f}" y="{top + PANEL + 16:.1f}" text-anchor="middle">{tick:,g}</text>')
    for steps, colour in ((chart.marks, "#8c959f"), (chart.breaks, "#d1242f")):
        parts += [
            f'<path d="M{x_of(x):.1f} {top}V{top + PANEL}" stroke="{colour}" stroke-dasharray="2 4"/>' for x in steps
        ]
    for number, line in enumerate(chart.lines):
        parts += _draw_line(line, x_of, y_of)
        parts.append(
            f'<text x="{LEFT + 10 + 220 * number}" y="{top - 6}" fill="{line.colour}">{escape(line.name)}</text>'
        )
    return parts


def _draw_line(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    points = line.points[:: -(-len(line.points) // MAX_POINTS) or 1]
    if line.is_dots:
        return [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{line.colour}"/>' for x, y in points]
    path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>'] if points else []


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round tick values that enclose [low, high].

    >>> nice_ticks(2.9, 5.7), nice_ticks(0, 0)
    ([2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 1.0])
    """
    if high <= low:
        return [float(floor(low)), floor(low) + max(1.0, abs(low) / 100)]
    raw = (high - low) / count
    size = 10.0 ** floor(log10(raw))
    step = next(factor * size for factor in (1.0, 2.0, 5.0, 10.0) if factor * size >= raw)
    first, digits = floor(low / step), 12 - floor(log10(step))
    ticks = [round(first * step, digits)]
    while ticks[-1] < high:
        ticks.append(round((first + len(ticks)) * step, digits))
    return ticks


def fetch_records(url: str) -> Sequence[MetricsRecord]:
    """The records of the last run at a URL; NotFoundError if it has none."""
    location = parse_location(url)
    try:
        text = open_store(location.url).read(f"{LOGS}/{METRICS}").decode(errors="replace")
    except NotFoundError as error:
        where = redact(join(location.url, LOGS, METRICS))
        raise NotFoundError(
            f"{where}: not there; give the URL or folder of a run that `titan-ckpt train` wrote"
        ) from error
    records = last_run(parse_records(text))
    if not any(record["event"] == Event.STEP for record in records):
        raise NotFoundError(f"{redact(url)}: its metrics have no step yet")
    return records


EPILOG = """\
examples:
  titan-ckpt plot runs/tiny -o tiny.svg
  titan-ckpt plot s3://bucket/run --json
"""


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments of `plot`."""
    parser.epilog = EPILOG
    parser.add_argument("url", metavar="RUN", help="URL or folder of a run")
    parser.add_argument(
        "-o", "--output", default="run.svg", metavar="FILE.svg", help="where the picture goes (run.svg)"
    )
    add_force_flag(parser)
    parser.add_argument("--json", action="store_true", help="print where the wall time went as JSON")


def run(arguments: Namespace) -> int:
    """Write the SVG; print its path and the goodput, as JSON on request."""
    if not arguments.output.endswith(".svg"):
        raise UsageError(f"-o {arguments.output}: the picture is an SVG; name it so, for example -o run.svg")
    records = fetch_records(arguments.url)
    account = goodput(records)
    picture = draw_svg(redact(arguments.url), account.text(), run_panels(records))
    write_picture(arguments.output, picture, is_forced=arguments.force)
    if arguments.json:
        write_json({**asdict(account), "fraction": account.fraction, "output": arguments.output}, indent=None)
    else:
        write_text(f"{arguments.output}: {account.text()}")
    return 0


PLOT = Command(configure=configure, run=run)
