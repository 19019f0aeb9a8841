"""Names of the files and folders of a run (docs/format.md)."""

from __future__ import annotations

import operator
import re
import secrets
import time
from contextlib import suppress
from typing import SupportsIndex, cast

from titan_ckpt.errors import UsageError
from titan_ckpt.location import MAX_STEP

COMMIT = "COMMIT.json"
MANIFEST = "manifest.json"
DIGESTS = "digests.bin"
METADATA = ".metadata"
OWNER = "OWNER.json"
RUN_ID = "run-id.txt"
UNMIRRORED = "unmirrored.txt"
DELETING = "deleting"
LOGS = "logs"
DEBUG = "debug"
ASSETS = "assets"

_STEP = re.compile(r"step-([0-9]{8,16})")
_FOREIGN_STEP = re.compile(r"(?:step-|iter_)([0-9]{1,18})")
_ATTEMPT = re.compile(r"a-\d{8}T\d{6}Z-[0-9a-f]{8}")
_DATA_FILE = re.compile(r"(?:\.\./step-\d{8,}/)?a-\d{8}T\d{6}Z-[0-9a-f]{8}/__\d+_\d+\.distcp")


def check_step(step: object) -> int:
    """`step` as an int. UsageError unless it is a whole number (a numpy integer, too) from 0 to MAX_STEP."""
    number: int | None = None
    if not isinstance(step, bool) and "bool" not in str(getattr(step, "dtype", "")):
        with suppress(TypeError):
            number = operator.index(cast(SupportsIndex, step))
    if number is None or not 0 <= number <= MAX_STEP:
        shown = repr(step) if number is None or abs(number) < 10 * MAX_STEP else "a huge number"
        raise UsageError(f"step is {shown[:100]}; it must be a whole number from 0 to {MAX_STEP}")
    return number


def step_folder(step: int) -> str:
    """The folder of a step.

    >>> step_folder(1200)
    'step-00001200'
    """
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a folder named by `step_folder`, None for any other name (`step-1200`, `step-00001200-keep`).

    >>> parse_step("step-00001200"), parse_step("step-1200"), parse_step("step-00001200-keep")
    (1200, None, None)
    """
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match and step_folder(int(match.group(1))) == name else None


def foreign_folder(step: int) -> str:
    """torchtitan's folder name of a step."""
    return f"step-{step}"


def foreign_folders(step: int) -> tuple[str, str]:
    """torchtitan's and Megatron's folder names of a step."""
    return foreign_folder(step), f"iter_{step:07d}"


def parse_foreign_step(name: str) -> int | None:
    """The step of a folder named by torchtitan, Megatron or another trainer, None for any other name.

    >>> parse_foreign_step("step-1200"), parse_foreign_step("iter_0001200"), parse_foreign_step("best-step-1200")
    (1200, 1200, None)
    """
    match = _FOREIGN_STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def new_attempt(now_s: float | None = None) -> str:
    """A folder name for one save attempt: its UTC start, from which the age of garbage is known, and 32 random bits."""
    return time.strftime("a-%Y%m%dT%H%M%SZ-", time.gmtime(now_s)) + secrets.token_hex(4)


def is_attempt(name: str) -> bool:
    """Whether `name` is a valid attempt name."""
    return _ATTEMPT.fullmatch(name) is not None


def data_file(attempt: str, rank: int, number: int = 0) -> str:
    """Path of a data file relative to the step's folder, named as by DCP."""
    return f"{attempt}/__{rank}_{number}.distcp"


def is_data_file(path: str) -> bool:
    """Whether a manifest may contain `path`: a data file of this step, or of another step of the same run."""
    return _DATA_FILE.fullmatch(path) is not None


def marks_folder(attempt: str) -> str:
    """Where deletions that take something from an attempt's folder leave a mark each; both are paths in the store."""
    return f"{attempt}/{DELETING}"
