"""The task of a peer: the pictures and every choice. Peers with other tasks form no crew, and a home belongs to one task."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.phones.choices import Choices
from examples.phones.settings import FILES
from titan_ckpt.errors import StoreError, UsageError

Task = dict[str, Any]
TASK = "task.json"


def task_of(pictures: Sequence[Path], choices: Choices) -> Task:
    """The choices, the number of pictures, and a digest of their names, sizes and bytes."""
    digest = hashlib.sha256()
    for path in pictures:
        data = path.read_bytes()
        digest.update(b"%s\0%d\0" % (os.fsencode(path.name), len(data)))
        digest.update(data)
    return {"pictures": len(pictures), "album": digest.hexdigest(), **choices.to_json()}


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What differs, from `own`'s side.

    >>> differences({"pictures": 2, "album": "a", "seed": 0}, {"pictures": 2, "album": "b", "seed": 7})
    'other pictures (2 in both albums), seed 7 instead of 0'
    """
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    said = [f"{name} {other.get(name)} instead of {own.get(name)}" for name in names if name != "album"]
    if names[:1] == ["album"]:
        said.insert(0, f"other pictures ({own.get('pictures')} in both albums)")
    return ", ".join(said)


def take_home(home: Path, task: Task) -> None:
    """Make `home` the folder of this task; UsageError if it has checkpoints of another one."""
    note = home / TASK
    try:
        home.mkdir(parents=True, exist_ok=True)
        if any((home / FILES).glob("*")):
            _check(home, json.loads(note.read_bytes()) if note.exists() else {}, task)
        part = note.with_name(f".{TASK}")
        part.write_text(json.dumps(task))
        part.replace(note)
    except OSError as error:
        raise StoreError(f"home {home}: cannot be used: {error.strerror}; give this peer a folder with room") from error
    except ValueError as error:
        raise UsageError(f"{note}: damaged ({error}); choose another --home") from error


def _check(home: Path, found: Task, task: Task) -> None:
    if found != task:
        what = f"another task: {differences(task, found)}" if found else f"a task unknown: there is no {TASK}"
        raise UsageError(
            f"{home}: has the checkpoints of {what}. "
            "Choose another --home, or delete this one, or go on with the old --album and --choices"
        )
