"""Closed sets of words that describe a checkpoint. Each compares equal to its plain string and is stored as one."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from titan_ckpt.arguments import check_word


class Choice(StrEnum):
    """A `StrEnum` whose repr is that of its plain string, so that messages and signatures stay readable."""

    __repr__ = str.__repr__

    @classmethod
    def parse(cls, value: str, name: str) -> Self:
        """The member for a caller's string. UsageError for any other word; `name` is the argument it came in."""
        check_word(value, cls, name)
        return cls(value)


class CheckpointKind(Choice):
    """What a checkpoint contains: all that training needs, weights only, or whatever another library wrote."""

    FULL = "full"
    MODEL = "model"
    FOREIGN = "foreign"


class CheckpointState(Choice):
    """`partial` has no COMMIT; `damaged` has one that does not agree with the files; a later release wrote `newer`.

    The store failed to read `unreadable`.
    """

    COMMITTED = "committed"
    PARTIAL = "partial"
    DAMAGED = "damaged"
    NEWER = "newer"
    UNREADABLE = "unreadable"


class OnDamage(Choice):
    """What to do when the newest checkpoint is damaged: raise, or log it and open the one before."""

    ERROR = "error"
    FALL_BACK = "fall_back"
