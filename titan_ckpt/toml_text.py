"""TOML that people wrote, parsed within bounds."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from titan_ckpt.errors import ConfigError

MAX_TEXT = 1 << 20
MAX_KEY_PARTS = 64
MAX_DIGITS = 300
# Of keys such as `a.b."c"`: the parser takes quadratic time for their parts.
_PART = r"(?:[A-Za-z0-9_-]++|\"[^\"\n]{0,200}+\"|'[^'\n]{0,200}+')[ \t]{0,9}+"
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]{{0,9}}+{_PART}){{{MAX_KEY_PARTS}}}")
_LONG_NUMBER = re.compile(rf"(?<![A-Za-z0-9_])0[xob][0-9A-Fa-f_]{{{MAX_DIGITS}}}")  # Python refuses to print it


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text. ConfigError if it is not one, larger than MAX_TEXT, nested too deeply, has keys of many
    parts, or numbers of many digits.

    >>> parse_toml("[mesh]\\ntp = 2", "x.toml")
    {'mesh': {'tp': 2}}
    """
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{where}: {len(text)} characters; no settings have more than {MAX_TEXT}")
    if _LONG_KEY.search(text):
        raise ConfigError(f"{where}: a key of more than {MAX_KEY_PARTS} parts")
    if _LONG_NUMBER.search(text):
        raise ConfigError(f"{where}: a number of more than {MAX_DIGITS} digits")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, a number of 5,000 digits, 1,000 brackets
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
