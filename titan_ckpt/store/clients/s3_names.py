"""The options of `s3://`: s3fs's names (https://s3fs.readthedocs.io/en/latest/api.html#s3fs.core.S3FileSystem) and a few of ours.

Values may be text, as in `FSSPEC_S3_*` and fsspec's files. An option that the botocore client cannot honour is a reason for s3fs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.store.clients.options import StorageOptions, check_known

# Name: (type of its value, whether the botocore client honours it).
OPTIONS: dict[str, tuple[type, bool]] = {
    "anon": (bool, True),
    "key": (str, True),
    "secret": (str, True),
    "token": (str, True),
    "username": (str, True),
    "password": (str, True),
    "endpoint_url": (str, True),
    "profile": (str, True),
    "use_ssl": (bool, True),
    "requester_pays": (bool, True),
    "client_kwargs": (dict, True),
    "config_kwargs": (dict, True),
    "s3_additional_kwargs": (dict, True),
    "default_block_size": (int, False),
    "default_fill_cache": (bool, False),
    "default_cache_type": (str, False),
    "version_aware": (bool, False),
    "cache_regions": (bool, False),
    "max_concurrency": (int, False),
    "fixed_upload_size": (bool, False),
    "local_expiry_check": (bool, False),
    "session": (object, False),
    "use_listings_cache": (bool, False),
    "listings_expiry_time": (float, False),
    "max_paths": (int, False),
    "skip_instance_cache": (bool, True),
    "region": (str, True),
    "access_key": (str, True),
    "secret_key": (str, True),
    "session_token": (str, True),
    "anonymous": (bool, True),
    "connect_timeout_s": (float, True),
    "read_timeout_s": (float, True),
}
_ALIASES = {
    "access_key": "key", "username": "key", "secret_key": "secret", "password": "secret", "session_token": "token",
    "anonymous": "anon",
}  # fmt: skip
# Of `create_client`, and what it is called in `S3Request`.
_CLIENT = {
    "region_name": "region", "endpoint_url": "endpoint_url", "use_ssl": "use_ssl", "verify": "verify", "aws_access_key_id": "key",
    "aws_secret_access_key": "secret", "aws_session_token": "token",
}  # fmt: skip
# Arguments of botocore's Config that the botocore client sets itself, and depends on.
_CONFIG_OF_OURS = frozenset(
    {
        "retries", "parameter_validation", "request_checksum_calculation", "response_checksum_validation", "defaults_mode",
        "disable_request_compression", "request_min_compression_size_bytes", "endpoint_discovery_enabled",
    }
)  # fmt: skip
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class S3Request:
    """What was asked of `s3://`, under s3fs's names. `unmet` are the options for which only s3fs will do."""

    options: dict[str, Any]
    unmet: tuple[str, ...]


def s3_request(options: StorageOptions, where: str, *, origin: str = "") -> S3Request:
    """Check and convert `options`. ConfigError, without its value, for one that is unknown, contradictory or mistyped."""
    if options.get("asynchronous") or options.get("loop") is not None:
        raise ConfigError(f"{where}: an asynchronous file system cannot be used here; leave out asynchronous and loop")
    given = {
        name: value for name, value in options.items() if value is not None and name not in ("asynchronous", "loop")
    }
    check_known(given, OPTIONS, where, origin)
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        target = _ALIASES.get(name, name)
        if target in parsed:
            raise ConfigError(f"{where}: {name} and {target} are two names of one option; give one")
        parsed[target] = typed_value(value, OPTIONS[name][0], f"{where}: option {name}{origin}")
    parsed.pop("skip_instance_cache", None)  # each store has a client of its own
    for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
        if not parsed.get(name, True):
            del parsed[name]
    _take_client_arguments(parsed, where)
    _take_config_arguments(parsed, where)
    unmet = [name for name in parsed if name in OPTIONS and not OPTIONS[name][1]]
    unmet += [f"config_kwargs[{name!r}]" for name in parsed.get("config_kwargs", {}) if name in _CONFIG_OF_OURS]
    return S3Request(options=parsed, unmet=tuple(unmet))


def _take_client_arguments(parsed: dict[str, Any], where: str) -> None:
    """Move what `client_kwargs` says to the options of the same meaning; s3fs refuses or prefers one of the two silently."""
    for name, value in parsed.pop("client_kwargs", {}).items():
        check_known({name: value}, dict(_CLIENT), f"{where}: client_kwargs")
        target = _CLIENT[name]
        if value is not None and parsed.setdefault(target, value) != value:
            raise ConfigError(f"{where}: client_kwargs[{name!r}] and {target} differ; give one")


def _take_config_arguments(parsed: dict[str, Any], where: str) -> None:
    from botocore.config import Config  # only where it is asked for

    config = dict(parsed.pop("config_kwargs", {}))
    check_known(config, frozenset(Config.OPTION_DEFAULTS), f"{where}: config_kwargs")
    if region := config.pop("region_name", None):
        parsed.setdefault("region", region)
    for ours, theirs in (("connect_timeout_s", "connect_timeout"), ("read_timeout_s", "read_timeout")):
        if ours in parsed:
            config[theirs] = parsed.pop(ours)
    if config:
        parsed["config_kwargs"] = config


def typed_value(value: Any, kind: type, what: str) -> Any:
    """`value`, converted from text where it is to be something else."""
    if kind is object:
        return value
    if isinstance(value, str) and kind is not str:
        value = _parsed(value, kind)
    if kind is str and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # FSSPEC_S3_KEY=123 comes as a number
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, Mapping if kind is dict else kind) or (kind is int and isinstance(value, bool)):
        words = {
            bool: "True or False",
            dict: "a mapping, or its JSON",
            str: "text",
            int: "a whole number",
            float: "a number",
        }
        raise ConfigError(f"{what} is of type {type(value).__name__}, or cannot be read; give {words[kind]}")
    return value


def _parsed(text: str, kind: type) -> Any:
    if kind is bool:
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else text
    try:
        return json.loads(text) if kind is dict else kind(text)
    except (ValueError, RecursionError):
        return text
