"""What the demo prints, and the file of its facts."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from titan_ckpt.console.output import flush, write_text

Facts: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """The result of an act: facts for facts.json, lines for the terminal."""

    facts: Facts
    lines: tuple[str, ...]


class StoryLog:
    """Print acts as they finish and record their facts in DIR/facts.json."""

    def __init__(self, path: Path, *, is_quiet: bool) -> None:
        self._path, self._is_quiet, self.facts = path, is_quiet, Facts()
        self._started = self._act_started = time.monotonic()

    def print(self, text: str) -> None:
        """Print a line; to stderr if stdout is for JSON."""
        write_text(text, sys.stderr if self._is_quiet else None)
        flush()

    def command(self, text: str) -> None:
        """Print a command before it runs."""
        self.print(f"         {text}")

    def add(self, number: int, name: str, act: Act) -> None:
        """Print and record a finished act."""
        now = time.monotonic()
        self.facts[name] = {"act": number, "seconds": round(now - self._act_started, 2), **act.facts}
        self._act_started = now
        for row, line in enumerate(act.lines):
            self.print(f"{f'{number} {name}' if row == 0 else '':<11}{line}")
        self.write()

    def write(self, **more: Any) -> None:
        """Write the facts so far."""
        self.facts |= {"seconds": round(time.monotonic() - self._started, 1), **more}
        self._path.write_text(json.dumps(self.facts, indent=1) + "\n")
