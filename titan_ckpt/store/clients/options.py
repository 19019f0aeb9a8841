"""Options that stores are opened with: those of a public function's `storage_options`, and those of a command line.

Both hold for every store that the call opens, however deep, so no function in between hands them on. Local paths take none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from titan_ckpt.arguments import check_type, nearest
from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.location import scheme

StorageOptions: TypeAlias = Mapping[str, Any]
Options: TypeAlias = StorageOptions | None
CLIENTS = ("auto", "botocore", "s3fs")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """`client` serves `s3://`; `words` are the arguments of a command line that say all this."""

    options: StorageOptions = field(default_factory=dict, repr=False)
    client: str = "auto"
    words: tuple[str, ...] = field(default=(), repr=False)


_of_command = StoreSettings()
_of_call: ContextVar[StoreSettings | None] = ContextVar("titan_ckpt_store_settings", default=None)


def current_settings() -> StoreSettings:
    """The settings of the public function that runs in this context, else those of the command."""
    return _of_call.get() or _of_command


@contextmanager
def settings_of_command(settings: StoreSettings) -> Iterator[None]:
    """Within the block, all threads open stores with `settings`."""
    global _of_command
    before, _of_command = _of_command, settings
    try:
        yield
    finally:
        _of_command = before


@contextmanager
def using(options: Options, *urls: object) -> Iterator[None]:
    """Within the block, this context opens stores with `options`; None changes nothing.

    UsageError if `options` is no mapping, or if none of `urls` is the URL of a store that takes options.
    """
    if options is None:
        yield
        return
    check_type(
        options, "storage_options", Mapping, hint="a mapping of options, such as {'endpoint_url': 'https://...'}"
    )
    for name in options:
        check_type(name, "a name in storage_options", str, hint="an option's name, as text")
    if not any(isinstance(url, str | os.PathLike) and scheme(os.fsdecode(url)) != "file" for url in urls):
        raise UsageError(
            "storage_options are given, but no URL of a store that takes options: local folders have none, and what is open "
            "already (a Store, a Checkpoint) has its own"
        )
    token = _of_call.set(StoreSettings(options=dict(options), client=current_settings().client))
    try:
        yield
    finally:
        _of_call.reset(token)


def check_known(
    options: StorageOptions, known: Mapping[str, object] | frozenset[str], where: str, origin: str = ""
) -> None:
    """ConfigError for an option that is not `known`; names it, never its value, and the nearest known one."""
    for name in options:
        if name not in known:
            raise ConfigError(
                f"{where}: unknown option {name!r}{origin}; {nearest(name, known)}the options are {', '.join(sorted(known))}"
            )
