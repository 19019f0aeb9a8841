"""How programs refuse their command line, before they do anything: then they end, on all ranks alike.

Forms of argparse (jsonargparse, HfArgumentParser on it), click, typer (rich boxes), tyro, absl, Hydra, fire and the interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_USAGE = re.compile(r"[Uu]sage: \S")
_BELOW_USAGE = re.compile(r"(?:\S{1,200}: )?[Ee]rror: (?P<message>.{1,400})$")
_ALONE = re.compile(r"ERROR: Could not consume arg: |Could not override '|\S{1,300}: can't open file '")
_FLAGS = "FATAL Flags parsing error:"
_BOX = re.compile(r"╭─+ ?(?P<title>Error|Parsing error|Unrecognized options|Required options) ─")


@dataclass(slots=True)
class Refusals:
    """Follows a writer's lines to the one that says what is wrong with the command line."""

    is_usage: bool = False  # the lines before belong to a usage
    is_next: bool = False  # the next line says it

    def take(self, text: str) -> str | None:
        """What is wrong with the command line, if this line says it."""
        if self.is_next:
            self.is_next = False
            return text.strip(" │|")
        if "ould not " in text or "can't open" in text:
            return text.strip() if _ALONE.match(text) else None
        if text.startswith(_FLAGS):
            said = text.removeprefix(_FLAGS).strip()
            self.is_next = not said
            return said or None
        if text.startswith("╭"):
            box = _BOX.match(text)
            self.is_next = box is not None and (self.is_usage or box["title"] != "Error")
        elif _USAGE.match(text):
            self.is_usage = True
        elif self.is_usage and not text.startswith((" ", "\t", "Try ")):
            self.is_usage = False
            match = _BELOW_USAGE.match(text)
            return match["message"] if match else None
        return None
