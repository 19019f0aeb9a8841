"""Pictures and pages that commands write where the user says: never over a file that no command of ours wrote."""

from __future__ import annotations

import os
import secrets
from argparse import ArgumentParser
from collections.abc import Iterable

from titan_ckpt.errors import AlreadyExistsError, StoreError, UsageError
from titan_ckpt.location import RESERVED_NAMES, is_in_step

MARK = "<!-- titan-ckpt -->"
_HEAD_BYTES = 4096


def add_force_flag(parser: ArgumentParser) -> None:
    """Add `--force`, which every command has that writes a file of the user's choice."""
    parser.add_argument("--force", action="store_true", help="replace a file that titan-ckpt did not write")


def check_svg(path: str) -> None:
    """UsageError if `path` is not the name of an SVG in a local folder that exists."""
    _check_local(path)
    if not path.lower().endswith(".svg"):
        raise UsageError(f"{path}: the picture is an SVG; give a name that ends with .svg")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"{path}: the folder {folder} does not exist; create it first")


def check_picture(path: str, *, is_forced: bool) -> None:
    """Refuse to write `path`: AlreadyExistsError for a file without our mark unless `is_forced`.

    UsageError without a name or a folder; and, forced or not, for a name that titan-ckpt gives to a file of a run, and for any
    other file in the folder of a step.
    """
    if not path:
        raise UsageError("the name of the file to write is empty; give one, such as report.html")
    name = os.path.basename(path)
    if name in RESERVED_NAMES:
        raise UsageError(f"{path}: titan-ckpt itself keeps a file of the name {name} in a run; give another name")
    _check_local(path)
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"{path}: there is no folder {os.path.dirname(path)}; make it first, or give another file")
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; give the name of a file")
    is_in_checkpoint = is_in_step(os.path.realpath(path).split(os.sep)[:-1])
    if not os.path.lexists(path) or (is_forced and not is_in_checkpoint):
        return
    if os.path.islink(path) or not os.path.isfile(path) or not _is_ours(path):
        if is_in_checkpoint:
            raise UsageError(f"{path} is in the folder of a checkpoint, which may need it; give another name")
        raise AlreadyExistsError(f"{path} is there already, and titan-ckpt did not write it; --force replaces it")


def _check_local(path: str) -> None:
    if "://" in path:
        raise UsageError(f"{path}: what is written is a local file; write it here and copy it there")


def write_picture(path: str, svg: str, *, is_forced: bool) -> None:
    """Write SVG or HTML to `path`, whole or not at all; StoreError if that is not possible."""
    head, end, rest = svg.partition(">")
    write_marked(path, (f"{head}{end}{MARK}{rest}",), is_forced=is_forced)


def write_marked(path: str, parts: Iterable[str], *, is_forced: bool) -> None:
    """Write text that has `MARK` in its first 4,096 bytes to `path`, whole or not at all."""
    check_picture(path, is_forced=is_forced)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".tmp-{secrets.token_hex(8)}-{name}"[:250])
    try:
        with open(temporary, "x", encoding="utf-8", errors="replace") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)


def _is_ours(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return MARK.encode() in file.read(_HEAD_BYTES)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
