"""What a load does with differences between checkpoint and state, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_ckpt.arguments import check_flag, check_number, check_whole
from titan_ckpt.checkpoint.kinds import Choice
from titan_ckpt.errors import UsageError

SHOWN = 20  # differences that an error lists


class OnMismatch(Choice):
    """What to do with a difference between checkpoint and state."""

    ERROR = "error"
    WARN = "warn"
    ALLOW = "allow"


class VerifyReads(Choice):
    """Which digests to check: of chunks that are read whole, of all (reading them whole), or none."""

    READ = "read"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """What to do if checkpoint and state differ: "error", "warn" or "allow". A different global shape is always an error.

    `missing`: names that only the state has. `extra`: names that only the checkpoint has, below the state's own top-level names.
    `cast`: a dtype that can represent the stored values; `lossy_cast`: one that cannot. Where the dtypes do not tell (int64 to
    float16) and only `lossy_cast` is "error", the values are compared before a tensor changes.
    `verify="read"` checks the digest of every chunk that is read whole; "all" reads every chunk whole; "none" checks nothing.
    `broadcast` reads once what several ranks hold, along whichever axes, plain tensors too: one of them reads, in shares of equal
    bytes, and sends to the others over gloo; then all ranks of the job must load, the same checkpoint.
    `timeout_s` bounds a load: it is given up with an error that names what was being read, and by which rank.
    `allow` lists classes and functions of the caller's that values of the checkpoint may be made of, by their own code; those of
    objects that the state holds in the same place are allowed anyway.
    With `together`, the ranks that share a DTensor's mesh all raise if one of them fails. They should load at the same time: one
    that waits 30 s for another logs it and loads by itself. False for a rank that loads alone: it neither waits nor hears.
    UsageError for any other word.
    """

    missing: OnMismatch | str = OnMismatch.ERROR
    extra: OnMismatch | str = OnMismatch.ERROR
    cast: OnMismatch | str = OnMismatch.ERROR
    lossy_cast: OnMismatch | str = OnMismatch.ERROR
    verify: VerifyReads | str = VerifyReads.READ
    broadcast: bool = False
    together: bool = True
    threads: int = 8
    timeout_s: float = 1800.0
    allow: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("missing", "extra", "cast", "lossy_cast"):
            object.__setattr__(self, name, OnMismatch.parse(getattr(self, name), name))
        for name in ("broadcast", "together"):
            check_flag(getattr(self, name), name)
        check_whole(self.threads, "threads", at_least=1)
        check_number(self.timeout_s, "timeout_s", above=0)
        if not isinstance(self.allow, list | tuple | set | frozenset) or not all(map(callable, self.allow)):
            raise UsageError("allow: expected a list of classes, such as [Config]")
        object.__setattr__(self, "verify", VerifyReads.parse(self.verify, "verify"))


@dataclass(slots=True)
class LoadReport:
    """What a load did on this rank, by name; `objects` are the values that are not tensors.

    `needed_bytes` is the size of the tensors, `fetched_bytes` what this rank read from the store for itself and others,
    `received_bytes` what others sent it (`LoadPolicy.broadcast`), `unverified_bytes` the part of what it read whose digest was
    not checked, because their chunks were read in part.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    needed_bytes: int = 0
    fetched_bytes: int = 0
    received_bytes: int = 0
    unverified_bytes: int = 0


def is_judged_by_values(policy: LoadPolicy) -> bool:
    """Whether a cast that may lose values is refused only if it does."""
    return policy.lossy_cast == OnMismatch.ERROR and policy.cast != OnMismatch.ERROR


def listed(errors: list[str]) -> str:
    """The first errors, one a line."""
    more = [f"... and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
    return "".join(f"\n  {line}" for line in [*errors[:SHOWN], *more])
