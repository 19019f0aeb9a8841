"""Links, pipes and folders planted where the recorder writes and `debug collect` publishes: followed nowhere, published never."""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
import time
from pathlib import Path

from titan_ckpt.debug.live.publish import publish
from titan_ckpt.debug.record.private_socket import bind_privately
from titan_ckpt.errors import TitanError
from titan_ckpt.private_files import PrivateFolder
from titan_ckpt.store.open import open_store
from tools.hostile.outcome import Outcome

_SECRET = b"precious, and not to be published"
_NAMES = (
    "rank_00000.box",
    "rank_00000.sidecar.json",
    "rank_00000.demand.stacks",
    "rank_00000.ask",
    "processes.h.json",
    "a.log",
)
_KINDS = ("link", "link to a folder", "dangling link", "hard link", "pipe", "folder", "socket", "file", "nothing")


def run_evidence_links(seed: int, seconds: float) -> Outcome:
    """Plant, write, publish; the victim must stay as it was, and none of its bytes may be at the destination."""
    outcome, rng = Outcome(part="links"), random.Random(seed)
    until = time.monotonic() + seconds
    while not outcome.cases or time.monotonic() < until:
        with tempfile.TemporaryDirectory() as scratch:
            _case(Path(scratch), rng, outcome)
    return outcome


def _case(scratch: Path, rng: random.Random, outcome: Outcome) -> None:
    victim, folder, outside = scratch / "victim", scratch / "evidence", scratch / "outside"
    victim.write_bytes(_SECRET)
    folder.mkdir()
    outside.mkdir()
    planted = {name: _plant(folder / name, rng.choice(_KINDS), victim, outside) for name in _NAMES}
    before = {
        name: _what(folder / name) for name, kind in planted.items() if kind not in ("file", "nothing", "hard link")
    }
    files = PrivateFolder(folder)
    for name in _NAMES:
        outcome.cases += 1
        try:
            if name.endswith(".ask"):
                bound = bind_privately(folder / name, _listen)
                bound.listener.close()
                if bound.folder is not None:
                    bound.remove()
            elif name.endswith(".box"):
                os.close(files.create(name, 4096))
            else:
                files.write(name, b"ours")
            outcome.counts["written"] += 1
        except TitanError:
            outcome.counts["refused"] += 1
    left_out = publish(folder, str(folder / "*.log"), open_store(str(scratch / "out")), is_forced=False)
    outcome.counts["left out"] += len(left_out)
    published = [path for path in (scratch / "out").rglob("*") if path.is_file() and _SECRET[:8] in path.read_bytes()]
    changed = [name for name, what in before.items() if not name.endswith(".ask") and _what(folder / name) != what]
    if victim.read_bytes() != _SECRET or list(outside.iterdir()) or published or changed:
        outcome.failures.append(f"{planted}: published {published}, changed {changed}, victim {victim.read_bytes()!r}")
    shutil.rmtree(folder)


def _plant(path: Path, kind: str, victim: Path, outside: Path) -> str:
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "link to a folder":
        path.symlink_to(outside)
    elif kind == "dangling link":
        path.symlink_to(outside / "new")
    elif kind == "hard link":
        os.link(victim, path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        _listen(str(path)).close()
    elif kind == "file":
        path.write_bytes(b"of an earlier run")
    return kind


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def _what(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_mode, found.st_ino, found.st_size
