"""Patterns over FQNs: `*` stands for characters within one name, `**` for any number of names."""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Iterator

from titan_ckpt.errors import ConfigError


def matching(pattern: str, fqns: Iterable[str]) -> list[str]:
    """The FQNs that `pattern` matches, in their order.

    >>> matching("layers.*", ["layers.0", "layers.0.mlp", "norm"])
    ['layers.0']
    >>> matching("**.[qk]_proj", ["layers.0.q_proj", "q_proj", "layers.0.o_proj"])
    ['layers.0.q_proj', 'q_proj']
    """
    matches = _compiled(pattern).fullmatch
    return [fqn for fqn in fqns if matches(fqn)]


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    tokens = re.split(r"(\*\*\.|\.\*\*|\*\*|\*|\?|\[[^\]]+\])", pattern)
    special = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    parts = [special.get(t) or (t.replace("[!", "[^") if t.startswith("[") else re.escape(t)) for t in tokens]
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a pattern of names: {error}") from error


def is_below(fqn: str, ancestors: Container[str]) -> bool:
    """Whether `fqn` is one of `ancestors` or lies inside one; `ancestors` is a set if there may be many.

    >>> is_below("layers.0.mlp.weight", ["layers.0"]), is_below("layers.01", ["layers.0"])
    (True, False)
    """
    return fqn in ancestors or any(name in ancestors for name in ancestors_of(fqn))


def ancestors_of(fqn: str) -> Iterator[str]:
    """The modules that `fqn` lies inside, innermost first.

    >>> list(ancestors_of("layers.0.mlp"))
    ['layers.0', 'layers']
    """
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn
