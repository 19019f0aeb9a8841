"""fsspec's own configuration, and which options a file system of fsspec knows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import fsspec.config
from fsspec.core import split_protocol

from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.store.clients.options import StorageOptions, check_known
from titan_ckpt.store.clients.s3_names import typed_value
from titan_ckpt.store.deadline import CONNECT_TIMEOUT_S, READ_TIMEOUT_S

# Options of every file system (fsspec/spec.py, fsspec/asyn.py), and those that a class takes as **kwargs and hands on:
# to paramiko's SSHClient.connect, to aiohttp's requests, to aiobotocore's AioSession.
_GENERAL = frozenset(
    {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "batch_size", "target_protocol",
     "target_options"}
)  # fmt: skip
_HANDED_ON = {
    "s3": frozenset({"profile"}),
    "sftp": frozenset(
        {"port", "username", "password", "pkey", "key_filename", "timeout", "allow_agent", "look_for_keys", "compress", "sock",
         "gss_auth", "gss_kex", "gss_deleg_creds", "gss_host", "banner_timeout", "auth_timeout", "channel_timeout",
         "gss_trust_dns", "passphrase", "disabled_algorithms", "transport_factory", "auth_strategy"}
    ),
    "http": frozenset(
        {"headers", "auth", "cookies", "params", "proxy", "proxy_auth", "ssl", "timeout", "allow_redirects", "max_redirects",
         "raise_for_status", "trust_env"}
    ),
}  # fmt: skip
# What is behind them is read through a copy, or cannot be changed file by file.
_READ_ONLY = {
    "simplecache",
    "filecache",
    "blockcache",
    "cached",
    "zip",
    "tar",
    "libarchive",
    "reference",
    "http",
    "https",
}
_IN_OTHERS = ("zip", "tar", "libarchive")
_SAME_AS = {"ssh": "sftp", "https": "http", "s3a": "s3"}
_ONE_TRY = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "read_timeout": READ_TIMEOUT_S,
    "retries": {"total_max_attempts": 1, "mode": "standard"},
}
# Of `self` and of calls that never end: a store is used by several threads, none of which runs an event loop.
_NOT_OURS = frozenset({"self", "args", "kwargs", "asynchronous", "loop"})


def configured(*protocols: str) -> dict[str, Any]:
    """What fsspec's files (`~/.config/fsspec`) and environment (`FSSPEC_*`) say of `protocols`."""
    found: dict[str, Any] = {}
    for protocol in protocols:
        given = fsspec.config.conf.get(protocol, {})
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"fsspec's configuration of {protocol!r} is a {type(given).__name__}, not a table of options"
            )
        found.update(given)
    return found


def check_no_ftp(protocols: Sequence[str], where: str) -> None:
    """UsageError for the file system of fsspec that cannot serve as a store."""
    if "ftp" in protocols:
        raise UsageError(
            f"{where}: ftp:// cannot be used: fsspec's client has one connection, which several threads cannot share. Use "
            "sftp://, or copy the run to a local folder"
        )


def _check_usable(protocols: Sequence[str], where: str) -> None:
    """UsageError for a URL that no store can serve."""
    check_no_ftp(protocols, where)
    if protocols[-1] in _IN_OTHERS:
        name = protocols[-1]
        raise UsageError(f"{where}: names no archive; write {name}://FOLDER_IN_IT::file:///path/of/archive.{name}")


def checked_options(url: str, options: StorageOptions, where: str) -> dict[str, Any]:
    """`options` for `url_to_fs`; text, as from a command line, becomes the type of the option's default.

    ConfigError for an option that the file system does not know. Chained URLs take options by protocol as well.
    """
    protocols = [split_protocol(part)[0] or part for part in url.split("::")]
    _check_usable(protocols, where)
    if options.get("asynchronous") or options.get("loop") is not None:
        raise UsageError(f"{where}: an asynchronous file system cannot be used here; leave out asynchronous and loop")
    flat = {
        name: value for name, value in options.items() if name not in protocols and name not in ("asynchronous", "loop")
    }
    check_known(flat, known_options(protocols[0]), where)
    checked = _typed(flat, protocols[0], where)
    for protocol in protocols:
        inner = options.get(protocol)
        if isinstance(inner, str):
            inner = typed_value(inner, dict, f"{where}: option {protocol}")
        if isinstance(inner, Mapping):
            check_known(inner, known_options(protocol), f"{where}: {protocol}")
            checked[protocol] = _typed(inner, protocol, where)
    if len(protocols) > 1 and "s3" in protocols:
        checked["s3"] = _tried_once(checked.get("s3", {}))
    return checked


def _tried_once(options: StorageOptions) -> dict[str, Any]:
    """Options for the s3fs inside a chain: `store.base.retry` repeats its calls, and other programs' instances are not shared."""
    given = {**configured("s3").get("config_kwargs", {}), **options.get("config_kwargs", {})}
    return {"skip_instance_cache": True, **options, "config_kwargs": {**_ONE_TRY, **given}}


def _typed(options: StorageOptions, protocol: str, where: str) -> dict[str, Any]:
    kind = fsspec.get_filesystem_class(protocol)
    parameters = {
        name: parameter
        for cls in reversed(kind.__mro__)
        if "__init__" in vars(cls)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
    }
    typed = {}
    for name, value in options.items():
        default = parameters[name].default if name in parameters else None
        of = type(default) if isinstance(default, bool | int | float) else dict
        is_text = isinstance(value, str) and (of is not dict or value.lstrip().startswith("{"))
        typed[name] = typed_value(value, of, f"{where}: option {name}") if is_text else value
    return typed


def known_options(protocol: str) -> frozenset[str]:
    """Names of the options of a protocol's file system."""
    kind = fsspec.get_filesystem_class(protocol)
    named = {
        name for cls in kind.__mro__ if "__init__" in vars(cls) for name in inspect.signature(cls.__init__).parameters
    }
    handed_on = _HANDED_ON.get(_SAME_AS.get(protocol, protocol), frozenset())
    return frozenset(named - _NOT_OURS - {"storage_options", "ssh_kwargs", "target_fs"}) | _GENERAL | handed_on


def read_only_in(url: str) -> str:
    """The part of a chained URL that cannot be written; empty if there is none."""
    names = (split_protocol(part)[0] or part for part in url.split("::"))
    return next((name for name in names if name in _READ_ONLY), "")
