"""What a command of `titan-ckpt` is; each room owns its own, `titan_ckpt.cli` only names them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`configure` adds the arguments; `run` does the work and returns the exit code (0 fine, 1 a finding)."""

    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
