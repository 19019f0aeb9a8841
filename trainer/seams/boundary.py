"""The boundary around code of the user's own: what it raises becomes one line with its file and line.

Every call of a user's part goes through `calling`. An error is the user's if a frame of its traceback is, or if torch raised it
for want of one (autograd, a call with other arguments); not if the network, another rank or the machine's memory caused it.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from titan_ckpt.errors import TitanError, UsageError
from titan_ckpt.location import redact_text

_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MACHINE = (MemoryError, torch.OutOfMemoryError, dist.DistError)
_NETWORK = ("closed by peer", "reset by peer", "Broken pipe", "imed out", "timeout", "Connection refused", "no longer")
_LONGEST = 500  # characters of an error's text


class OwnCodeError(UsageError):
    """Code of the user's own (a model, a loss, data, a hook) raised an error, or returned what its seam does not allow."""


@contextmanager
def calling(seam: str, owner: object = None) -> Iterator[None]:
    """Turn an error of the user's code into an OwnCodeError; others, and TitanErrors, pass as they are.

    `seam` is what was called; `owner` the user's object, for errors that none of the user's lines raised.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        found = blamed(error, seam, owner)
        if found is error:
            raise
        raise found from error


def blamed(error: BaseException, seam: str, owner: object = None) -> BaseException:
    """The error to raise in place of `error`: a TitanError that caused it, an OwnCodeError if it is the user's, or itself."""
    root = error
    while not isinstance(root, TitanError) and root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, TitanError):
        return root
    if isinstance(root, _MACHINE) or any(word in str(root) for word in _NETWORK):
        return error
    where = _place(root, owner)
    return error if where is None else OwnCodeError(f"{where}: {seam} raised {describe_error(root)}")


def describe_error(error: BaseException) -> str:
    """Kind and text of an error, in one line."""
    if isinstance(error, SystemExit):
        return f"SystemExit({error.code!r}), which would end the process"
    text = redact_text(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_LONGEST]}".removesuffix(": ")


def refuse(seam: str, owner: object, found: str) -> NoReturn:
    """Raise an OwnCodeError for something that `owner` returned or is: `found` says what, and what was expected."""
    where = defined_at(owner)
    raise OwnCodeError(f"{where + ': ' if where else ''}{seam} {found}")


def kind_of(value: object) -> str:
    """A value for an error: its type, and a number or text itself."""
    return f"{value!r:.80}" if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"


def checked_numbers(found: object, seam: str, owner: object, taken: Collection[str]) -> dict[str, float]:
    """Numbers by name, as a user's code returned them; names in `taken` are refused."""
    if not isinstance(found, Mapping):
        refuse(seam, owner, f"returned {kind_of(found)}, expected numbers by name; {{}} for none")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Real) or name in taken:
            refuse(seam, owner, f"returned {name!r}: {kind_of(value)}, expected a number of another name")
    return {name: float(value) for name, value in found.items()}


def _place(error: BaseException, owner: object) -> str | None:
    """File and line to name, None if the error is not the user's."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short(error.filename)}:{error.lineno}"
    frames, own = _frames(error), _package_of(owner)
    names = [_module_of(frame) for frame, _ in frames]
    users = [i for i, (frame, _) in enumerate(frames) if _is_users(frame, own)]
    if users:
        if any(_is_network(name) for name in names[users[-1] + 1 :]):
            return None
        frame, line = frames[users[-1]]
        return f"{_short(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}"
    inner = names[-1] if names else ""
    is_torchs = inner.startswith("torch.") and not _is_network(inner)
    return defined_at(owner) if is_torchs or len(set(names)) <= 2 else None  # this module's frame and the caller's


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return frames


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_network(module: str) -> bool:
    return module.startswith("torch.distributed.") and not module.startswith("torch.distributed.tensor")


def _is_users(frame: FrameType, own_package: str) -> bool:
    package, file = _module_of(frame).partition(".")[0], frame.f_code.co_filename
    if package == "titan_ckpt" or file.startswith("<"):
        return False
    return package == own_package or not file.startswith(_LIBRARIES)


def _package_of(owner: object) -> str:
    module = getattr(_definition(owner), "__module__", None) or ""
    return str(module).partition(".")[0]


def defined_at(owner: object) -> str | None:
    """File and line that define a user's object; None for the trainer's own parts."""
    made = _definition(owner)
    if owner is None or _package_of(owner) in ("titan_ckpt", "torch", "builtins"):
        return None
    try:
        file = inspect.getsourcefile(made)
        line = made.__code__.co_firstlineno if hasattr(made, "__code__") else inspect.getsourcelines(made)[1]
    except (OSError, TypeError):
        return getattr(made, "__qualname__", type(owner).__name__)
    return f"{_short(file or '?')}:{line}"


def _definition(owner: object) -> Any:
    """What has a place in a file: a function, or the class of an object."""
    made: Any = getattr(owner, "func", owner)  # functools.partial
    made = getattr(made, "__func__", made)
    return made if inspect.isfunction(made) or inspect.isclass(made) else type(made)


def _short(file: str) -> str:
    """The path from here if it lies below, else the whole one."""
    here = os.path.relpath(file)
    return file if here.startswith(os.pardir) else here
