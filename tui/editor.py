"""Hand a line of code to the user's editor."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from textual.app import App, SuspendNotSupported

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
