"""`titan-ckpt completion SHELL`, and what the shell is told at each TAB. By argcomplete, which bash, zsh and fish call."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from typing import Any, cast

from titan_ckpt.checkpoint.open import list_checkpoints
from titan_ckpt.console.command import Command
from titan_ckpt.console.output import write_text
from titan_ckpt.errors import TitanError
from titan_ckpt.location import scheme
from titan_ckpt.store.time_limit import on_a_thread

SHELLS = ("bash", "zsh", "fish")
PATIENCE_S = 2.0  # for the steps of a run in a store; nobody waits longer for a TAB
EPILOG = """\
Completes commands, options, files, and the steps of a run after `URL@`.

examples:
  titan-ckpt completion bash >> ~/.bashrc
  titan-ckpt completion zsh >> ~/.zshrc
  titan-ckpt completion fish > ~/.config/fish/completions/titan-ckpt.fish
"""


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("shell", choices=SHELLS, help="whose start-up file the lines are for")


def run(arguments: Namespace) -> int:
    """Print the lines that switch completion on."""
    from argcomplete.shell_integration import shellcode

    write_text(shellcode(["titan-ckpt"], shell=arguments.shell))
    return 0


def complete(build: Callable[[str | None], ArgumentParser], commands: Iterable[str]) -> None:
    """Answer the shell, which has started this process at a TAB (it sets `_ARGCOMPLETE`), and end the process."""
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser = build(next((word for word in words[1:] if word in commands), ""))
    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=cast(Any, _candidates))


def _candidates(prefix: str, **_: Any) -> list[str]:
    """Steps of a run after `URL@`, else files and folders."""
    from argcomplete.completers import FilesCompleter

    url, at, _step = prefix.rpartition("@")
    if at:
        return [f"{url}@{step}" for step in steps_of(url)]
    found: list[str] = FilesCompleter()(prefix)
    return found


def steps_of(url: str) -> list[int]:
    """The committed steps of a run; none if it cannot be listed, or not within PATIENCE_S where it is no local folder."""
    try:
        if scheme(url) == "file":
            infos = list_checkpoints(url)
        else:
            done = on_a_thread(PATIENCE_S, lambda: list_checkpoints(url))
            infos = [] if done is None else done.result()
    except TitanError:
        return []  # an error has no place in a line that is being typed
    return [info.step for info in infos if info.is_resumable or info.commit is not None]


COMPLETION = Command(configure=configure, run=run)
