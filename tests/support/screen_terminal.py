"""Run the program in a real terminal: a pseudo-terminal with an emulator, or a tmux session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pyte

DEADLINE_S = 60
ENTER, ESCAPE, DOWN = "\r", "\x1b", "\x1b[B"
_TMUX_NAMES = {ENTER: "Enter", ESCAPE: "Escape", DOWN: "Down"}


class Terminal(Protocol):
    """A screen to read, keys to press, a window to resize."""

    def text(self) -> str:
        """The current screen, after processing new output."""
        ...

    def press(self, keys: str) -> None: ...

    def resize(self, columns: int, lines: int) -> None: ...

    def ended_with(self) -> int:
        """Wait for the program to end and return its exit code."""
        ...


def see(terminal: Terminal, text: str) -> str:
    """Wait until `text` is on the screen and return the screen."""
    deadline = time.monotonic() + DEADLINE_S
    while text not in (screen := terminal.text()):
        assert time.monotonic() < deadline, f"{text!r} is not on the screen:\n{screen}"
    return screen


def wait_until(terminal: Terminal, is_so: Callable[[], bool]) -> None:
    """Read what the program writes until `is_so`."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        screen = terminal.text()
        assert time.monotonic() < deadline, screen


def _hear_hangups() -> None:
    """Of tests that run under `nohup` a program would inherit that it ignores SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class PseudoTerminal:
    """A pty that is the program's controlling terminal; pyte emulates the screen."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.screen, self.raw = pyte.Screen(80, 24), b""
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self._set_size(80, 24)
        # A session leader that opens a terminal gets it as its controlling one, and so receives SIGWINCH.
        shell = ["sh", "-c", 'exec <"$0" >"$0" 2>&1; exec "$@"', os.ttyname(slave), *command]
        self.process = subprocess.Popen(
            shell, start_new_session=True, cwd=folder, env=environment, preexec_fn=_hear_hangups
        )
        self._slave = slave

    def text(self) -> str:
        while select.select([self._master], [], [], 0.05)[0]:
            data = os.read(self._master, 65536)
            self.raw += data
            self._stream.feed(data)
        return "\n".join(line.rstrip() for line in self.screen.display)

    def press(self, keys: str) -> None:
        self.press_bytes(keys.encode())

    def press_bytes(self, data: bytes) -> None:
        """Send what is no text in UTF-8."""
        os.write(self._master, data)

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def ended_with(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.text()
        return self.process.returncode

    def close(self) -> None:
        """Kill the program if it still runs, and close the pty."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        if self._master >= 0:
            self.hang_up()

    def hang_up(self) -> None:
        """End the terminal: the kernel sends the program SIGHUP, then SIGCONT."""
        os.close(self._master)
        self._master = -1


class Tmux:
    """A session of a private tmux server."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self._socket = folder / "socket"
        shell = f"cd {shlex.quote(str(folder))}; {shlex.join(command)}; echo ended with $?; cat"
        given = [f"{name}={value}" for name, value in environment.items() if name not in ("TERM", "TMUX")]
        self.run("new-session", "-d", "-s", "job", "-x", "80", "-y", "24", "env", "-i", *given, "TERM=screen-256color",
                  "sh", "-c", shell)  # fmt: skip

    def run(self, *arguments: str) -> str:
        """Run a command of tmux on this server; returns what it prints."""
        command = ["tmux", "-f", "/dev/null", "-S", str(self._socket), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def text(self) -> str:
        return self.run("capture-pane", "-p", "-t", "job")

    def press(self, keys: str) -> None:
        name = _TMUX_NAMES.get(keys)
        self.run("send-keys", "-t", "job", *([name] if name else ["-l", keys]))

    def resize(self, columns: int, lines: int) -> None:
        self.run("resize-window", "-t", "job", "-x", str(columns), "-y", str(lines))

    def ended_with(self) -> int:
        return int(see(self, "ended with").rpartition("ended with ")[2].split()[0])

    def close(self) -> None:
        """Kill the server, and with it the program."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.run("kill-server")


TERMINAL_KINDS: Mapping[str, type[PseudoTerminal] | type[Tmux]] = {"pty": PseudoTerminal, "tmux": Tmux}


def variables(**environment: str) -> dict[str, str]:
    """The environment of a program in a terminal."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return {**plain, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment}


def tui_command(path: Path) -> list[str]:
    """`titan-ckpt tui PATH`."""
    return [sys.executable, "-m", "titan_ckpt", "tui", str(path)]


@contextlib.contextmanager
def opened(kind: str, path: Path, folder: Path, **environment: str) -> Iterator[PseudoTerminal | Tmux]:
    """`titan-ckpt tui PATH` in a terminal of 80 x 24."""
    terminal = TERMINAL_KINDS[kind](tui_command(path), folder, variables(**environment))
    try:
        yield terminal
    finally:
        terminal.close()


@contextlib.contextmanager
def shell(folder: Path, **environment: str) -> Iterator[PseudoTerminal]:
    """A shell with job control in a pseudo-terminal."""
    terminal = PseudoTerminal(["bash", "--norc", "--noprofile", "-i"], folder, variables(PS1="ready$ ", **environment))
    try:
        yield terminal
    finally:
        terminal.close()
