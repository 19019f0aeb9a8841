"""Evidence that others made who know the documents and not the code: `python -m tests.debug.outsiders.pieces` pins the verdicts.

`outsiders.tar.xz` and `outsiders_later.tar.xz` in `tests/data` hold it, with truth.json: the ranks at fault (or `none`,
`subset:1,2`, `not:0`, `none_or:1` and the like), the verdicts that are right, and whether "undecided" is honest (`soft`).
`tests/data/incidents.tar.xz` holds the 135 pieces of `test_world`. `tests/data/verdicts.txt` has what `debug` says of each, and
of this project's own recordings and small jobs.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.debug.diagnosis.test_small_jobs import JOBS
from tests.support.small_jobs import job
from titan_ckpt.debug import Verdict, diagnose, open_run
from tools.paths import DATA

RECORDED = ("flight_recorder", "injected")
ARCHIVES = {"outsiders": "truth.json", "outsiders_later": "truth.json", "incidents": "MANIFEST.json"}
PINNED = DATA / "verdicts.txt"
_HEAD = "== "


def unpack(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """All pieces below `folder`: name to path and truth."""
    pieces = {}
    for name, truths in ARCHIVES.items():
        with tarfile.open(DATA / f"{name}.tar.xz") as archive:
            archive.extractall(folder / name, filter="data")
        for piece, truth in json.loads((folder / name / truths).read_text()).items():
            pieces[f"{name}/{piece}"] = (folder / name / piece / truth.get("file", ""), truth)
    return pieces


def all_told(pieces: Mapping[str, tuple[Path, dict[str, Any]]]) -> Iterator[tuple[str, Callable[[], str]]]:
    """What is said of each piece, each recording of this project and each job of `small_jobs.txt`, when it is asked for."""
    cases = [case for kind in RECORDED for case in sorted((DATA / kind).iterdir()) if case.is_dir()]
    recorded = {f"{case.parent.name}/{case.name}/": case for case in cases}
    for name, path in {**{name: path for name, (path, _) in pieces.items()}, **recorded}.items():
        yield name, partial(_told_of, path)
    for name, (text, _) in JOBS.items():
        yield f"small_jobs/{name}", partial(lambda text: told(diagnose(job(text))), text)


def _told_of(path: Path) -> str:
    return told(verdicts_of(path))


@cache
def verdicts_of(path: Path) -> Sequence[Verdict]:
    """All verdicts on a piece; several tests ask for them."""
    return diagnose(open_run(str(path)))


def told(verdicts: Sequence[Verdict]) -> str:
    """The verdicts, a line each, and all of the first one but its evidence's texts."""
    return "\n".join((*(_line(verdict) for verdict in verdicts), *_rest(verdicts[0])))


def _line(verdict: Verdict) -> str:
    ranks = " ".join(
        f"{name} {','.join(map(str, found))}"
        for name, found in (("of", verdict.culprits), ("suspects", verdict.suspects), ("victims", verdict.victims))
        if found
    )
    kind = f"{verdict.verdict}/{verdict.subtype}" if verdict.subtype else f"{verdict.verdict}"
    return f"{kind} {verdict.confidence:.2f} {ranks}: {' '.join(verdict.headline.split())[:200]}"


def _rest(verdict: Verdict) -> Iterator[str]:
    yield f"  at {verdict.group} {verdict.seq} {verdict.op} {verdict.step} {verdict.signal} {verdict.file}:{verdict.line}"
    yield "  waits " + " ".join(f"{waiter}>{awaited}" for waiter, awaited in verdict.chain[:40])
    for evidence in verdict.evidence:
        yield f"  by {evidence.rank} {evidence.source} {evidence.file}:{evidence.line} {evidence.text[:120]!r}"
    for step in verdict.next_steps:
        yield f"  do {step[:60]}"


def pinned() -> dict[str, str]:
    """What was said of each piece."""
    parts = PINNED.read_text().split(f"\n{_HEAD}")
    return {head: text.strip("\n") for head, _, text in (part.partition("\n") for part in parts if part.strip())}


def part_of(name: str) -> str:
    """The set and the first letter of a piece."""
    folder, _, piece = name.removesuffix("/").partition("/")
    return f"{folder}/{piece.partition('/')[0]}/{piece.partition('/')[2][:1]}"


def outcome(verdict: Verdict, truth: Mapping[str, Any]) -> str:
    """right, kind (right ranks, another verdict), undecided, accused (an innocent rank) or healthy (of a hang)."""
    ranks, accused = truth["ranks"], set(verdict.culprits)
    if verdict.verdict == "RUNNING" and "HEALTHY" in truth["verdict"]:
        return "right"  # as far as the evidence goes: no end of the job is known
    if verdict.verdict in ("HEALTHY", "RUNNING") and verdict.verdict not in truth["verdict"]:
        is_open = verdict.verdict == "RUNNING" and truth.get("soft")  # one look, at a wait that was not long yet
        return "undecided" if is_open else "healthy"
    if (isinstance(ranks, str) and _agrees(ranks, accused)) or accused == set(ranks):
        return "right" if verdict.verdict in truth["verdict"] else "kind"
    if verdict.verdict == "RANK_DIED" in truth["verdict"] and not accused and set(verdict.victims) == {*ranks}:
        return "right"  # all died alike: each is named, and none is accused
    return "undecided" if not isinstance(ranks, str) and accused < set(ranks) else "accused"


def _agrees(rule: str, accused: set[int]) -> bool:
    name, _, text = rule.partition(":")
    listed = {int(rank) for rank in text.split(",") if rank}
    return {
        "none": not accused, "none_or_all": len(accused) != 1, "none_or_hosts": accused <= set(range(8, 16)),
        "not": not accused & listed, "subset": accused <= listed, "none_or": accused <= listed,
    }[name]  # fmt: skip


def main() -> None:
    """Write the verdicts of today."""
    with TemporaryDirectory() as folder:
        texts = [f"{_HEAD}{name}\n{tell()}\n" for name, tell in all_told(unpack(Path(folder)))]
    PINNED.write_text("\n" + "\n".join(texts))


if __name__ == "__main__":
    main()
