"""What a mistyped URL of a run probably meant."""

from __future__ import annotations

import os
import re
from itertools import islice

from titan_ckpt.format.names import METADATA, parse_step
from titan_ckpt.location import local_path, meant, redact, scheme

CONFIG = "config.json"
MOST_NAMES = 10_000
MOST_LOOKED_INTO = 200
MOST_SHOWN = 5


def nearby(url: str) -> str:
    """`; did you mean ...?` for the URL of a run that is not there, or the runs in the folder; "" if nothing is like it.

    Lists local folders alone.
    """
    if (match := re.search(r"@([^@/]+)\Z", url)) is not None:
        return f"; {redact(match[1])!r} is no step: write a number, {redact(url[: match.start()])}@1200, or @latest"
    path = local_path(url)
    if scheme(url) != "file":
        return ""
    if os.path.isfile(path):
        return "; it is a file, and a run is a folder"
    if os.path.exists(path):
        return _runs_below(path) or _of_others(path)
    return f"; {why}" if (why := meant(path)) else ""


def _runs_below(folder: str) -> str:
    """The first runs in `folder`, by their step folders; "" if there are none."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MOST_NAMES) if entry.is_dir())
        found = [
            name for name in names[:MOST_LOOKED_INTO] if any(map(_is_step, os.listdir(os.path.join(folder, name))))
        ]
    except OSError:
        return ""
    more = ", ..." if len(found) > MOST_SHOWN else ""
    return f"; runs in this folder: {', '.join(found[:MOST_SHOWN])}{more}" if found else ""


def _of_others(folder: str) -> str:
    """What of other libraries is in `folder`, and what to do with it; "" if nothing that is known."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, MOST_NAMES))
    except OSError:
        return ""
    if "adapter_config.json" in names:
        return (
            "; it is a PEFT adapter: merge it by `titan-ckpt convert to-hf BASE OUT --merge-lora ADAPTER` and give OUT"
        )
    if CONFIG not in names and any(name.endswith(".safetensors") for name in names):
        return f"; it holds safetensors without the {CONFIG} of a Hugging Face model: add that file"
    found = [name for name in names[:MOST_LOOKED_INTO] if os.path.isfile(os.path.join(folder, name, METADATA))]
    more = ", ..." if len(found) > MOST_SHOWN else ""
    return f"; checkpoints of torch in this folder, give one: {', '.join(found[:MOST_SHOWN])}{more}" if found else ""


def _is_step(name: str) -> bool:
    return parse_step(name) is not None
