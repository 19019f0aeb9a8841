"""Hand a line of code to the user's editor, and the report to a file."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from textual.app import App, SuspendNotSupported

from titan_ckpt.console.escapes import escape_text
from titan_ckpt.debug.report.text import report_text
from titan_ckpt.location import redact_text
from titan_ckpt.tui.data.incident import Incident

_BY_COLON = ("code", "codium", "cursor", "subl", "hx", "helix", "zed")  # these take FILE:LINE


def editor_command(editor: str, file: str, line: int) -> list[str]:
    """The command that opens `file` at `line`.

    >>> editor_command("vim", "/a b.py", 3), editor_command("code --wait", "a.py", 3)
    (['vim', '+3', '/a b.py'], ['code', '--wait', '--goto', 'a.py:3'])
    """
    words = shlex.split(editor) or ["vi"]
    name = Path(words[0]).name
    if name in _BY_COLON:
        goto = ["--goto"] if name in ("code", "codium", "cursor") else []
        return [*words, *goto, f"{file}:{line}"]
    return [*words, f"+{line}", file]


def open_in_editor(app: App[None], file: str, line: int) -> str:
    """Open `file` at `line` in $VISUAL or $EDITOR while the screens are suspended; returns what went wrong, or ""."""
    if not Path(file).is_file():
        return f"{file} is not on this machine"
    command = editor_command(
        os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi", str(Path(file).absolute()), line
    )
    try:
        with app.suspend():
            code = subprocess.run(command, check=False).returncode
    except SuspendNotSupported:
        return "this terminal cannot be handed to an editor"
    except OSError as error:
        return f"{command[0]}: {error.strerror}; set EDITOR"
    return f"{command[0]} ended with {code}" if code else ""


def report_name(incident: Incident) -> str:
    """The name of a report's file to begin with."""
    return f"{incident.run.incident.replace('/', '-') or 'incident'}-report.txt"


def export_report(incident: Incident, path: str) -> str:
    """Write the diagnosis as text to a new file; returns what to say."""
    try:
        with Path(path).expanduser().open("x", encoding="utf-8") as file:
            file.write(escape_text(redact_text(report_text(incident.run, incident.verdicts))))
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        return f"{path} not written: {getattr(error, 'strerror', None) or error}"
    return f"report written to {path}"
