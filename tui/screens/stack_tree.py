"""The main threads' stacks merged into a tree: each frame with its ranks, with a branch where the ranks diverge."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from titan_ckpt.console.ranks import ranks_text
from titan_ckpt.debug.incident.frames import is_library
from titan_ckpt.debug.incident.records import Frame
from titan_ckpt.tui.data.incident import Incident, frame_text
from titan_ckpt.tui.pictures.stacks import stacks_of
from titan_ckpt.tui.rows import CULPRIT, Role, Row, RowLink, TextSpan, ranks_named, row, truncate

MAX_SOURCE_BYTES = 4 << 20
_MOST_INDENT = 24


def tree_rows(incident: Incident, members: tuple[int, ...], width: int) -> Iterator[Row]:
    """The tree, outermost call first; ranks without a stack last."""
    stacks = stacks_of(incident, members)
    yield from _node_rows(stacks, 0, 0, width, frozenset(incident.top.culprits))
    silent = [rank for rank in members if rank not in stacks]
    late = [rank for rank in silent if incident.run.ranks[rank].stacks]
    role = Role.DIM if incident.is_over else Role.WARN
    for text, ranks in (("no stack", sorted(set(silent) - set(late))), ("no stack from before the end", late)):
        if ranks:
            yield row((f"  {text}: ", role), ranks_named(ranks))


def _node_rows(
    stacks: Mapping[int, tuple[Frame, ...]], depth: int, indent: int, width: int, culprits: frozenset[int]
) -> Iterator[Row]:
    nodes: dict[tuple[str, str, int], dict[int, tuple[Frame, ...]]] = defaultdict(dict)
    for rank, frames in stacks.items():
        if depth < len(frames):
            nodes[_node_of(frames[depth])][rank] = frames
    ended = [rank for rank, frames in stacks.items() if depth == len(frames)]
    is_fork = len(nodes) + bool(ended) > 1
    below_indent = min(indent + 2, _MOST_INDENT) if is_fork else indent
    culprits_first = sorted(nodes.values(), key=lambda below: (not below.keys() <= culprits, min(below)))
    for number, below in enumerate(culprits_first, 1):
        frame = below[min(below)][depth]
        branch = "└ " if number == len(nodes) else "├ "
        space = f"  {' ' * indent}{branch if is_fork and indent < _MOST_INDENT else ''}"
        place = frame_text(frame)
        role: Role = Role.DIM if is_library(frame) else Role.BOLD if is_fork else Role.PLAIN
        ends = is_fork or any(len(below[rank]) == depth + 1 for rank in below.keys() & culprits)
        ranks = _ranks_of(below.keys(), culprits if ends else frozenset())
        yield row(space, (place, role), *ranks, link=RowLink(screen=6, rank=min(below)),
                  at=(frame.file, frame.line))  # fmt: skip
        text = next(filter(None, (source_line(frames[depth]) for frames in below.values())), "")
        if text:
            yield row(
                (truncate(f"  {' ' * below_indent}  > {text}", width), Role.DIM),
                link=RowLink(screen=6, rank=min(below)),
            )
        yield from _node_rows(below, depth + 1, below_indent, width, culprits)


def _ranks_of(ranks: Iterable[int], culprits: frozenset[int]) -> Iterator[TextSpan]:
    """The ranks of a node, those at fault first."""
    for is_culprit, role in ((True, Role.BAD), (False, Role.NOTE)):
        its = sorted(rank for rank in ranks if (rank in culprits) == is_culprit)
        if its:
            yield f"  {f'{CULPRIT} ' if is_culprit else ''}[{ranks_text(its, 8)}]", role


def _node_of(frame: Frame) -> tuple[str, str, int]:
    """What makes calls one node: where in a library function a rank is says less than what it calls there."""
    return frame.file, frame.function, -1 if is_library(frame) else frame.line


def source_line(frame: Frame) -> str:
    """Source line of a user frame: as saved with the stack, else from the file on this machine."""
    if is_library(frame):
        return ""
    if frame.text or not frame.file.endswith(".py"):
        return frame.text
    lines = _lines(frame.file)
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


@functools.lru_cache(maxsize=64)
def _lines(path: str) -> tuple[str, ...]:
    try:
        file = Path(path)
        if not file.is_file() or file.stat().st_size > MAX_SOURCE_BYTES:
            return ()
        return tuple(file.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):
        return ()
