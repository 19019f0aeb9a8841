"""The register of programs, each with the truth about it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

MARK = "# CULPRIT"

SKIPPED = frozenset(
    {"SKIPPED_COLLECTIVE", "OP_MISMATCH", "SIZE_MISMATCH", "ORDER_MISMATCH", "CALLSITE_DIVERGENCE", "DTYPE_MISMATCH"}
)
PEER = frozenset({"P2P_MISSING_PEER", "P2P_SIZE_MISMATCH", "P2P_CYCLE"})
GROUP = frozenset({"WRONG_GROUP", "PG_CONFIG_CONFLICT", "PG_INIT_HANG", "SKIPPED_COLLECTIVE", "ORDER_MISMATCH"})
STUCK = frozenset({"STUCK_ON_CPU"})
FROZEN = frozenset({"RANK_FROZEN"})
DIED = frozenset({"RANK_DIED"})
NO_FAULT = frozenset({"HEALTHY", "RUNNING", "STRAGGLER"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A program, the same on all `ranks`, and what an analyzer must find.

    `culprits`: these ranks, or (`any_of`) some of them. `end`: what a launcher or a person does to it: nothing (its own timeouts
    end it), SIGTERM to the launcher, SIGINT. `joins` is False where the program makes the process group itself.
    """

    name: str
    program: Callable[[int], None]
    ranks: int
    culprits: frozenset[int]
    kinds: frozenset[str]
    any_of: bool = False
    end: str = ""
    restarts: int = 0
    joins: bool = True

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.culprits and self.kinds <= NO_FAULT | {"INSUFFICIENT_DATA"}

    @property
    def lines(self) -> frozenset[int]:
        """The lines at fault; empty where no line of Python is."""
        lines, first = inspect.getsourcelines(self.program)
        return frozenset(first + number for number, line in enumerate(lines) if MARK in line)


INCIDENTS: dict[str, Incident] = {}


def incident(
    ranks: int, culprits: set[int], kinds: frozenset[str], *, any_of: bool = False, end: str = "", restarts: int = 0,
    joins: bool = True,
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:  # fmt: skip
    """Register a program under its name."""

    def register(program: Callable[[int], None]) -> Callable[[int], None]:
        INCIDENTS[program.__name__] = Incident(
            name=program.__name__, program=program, ranks=ranks, culprits=frozenset(culprits), kinds=kinds, any_of=any_of,
            end=end, restarts=restarts, joins=joins,
        )  # fmt: skip
        return program

    return register
