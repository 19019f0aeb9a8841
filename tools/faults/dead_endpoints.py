"""S3 endpoints behind which there is nobody, and how long our commands take to say so.

The part `dead endpoints` of scripts/hostile.py runs real commands against each: the first line on stderr must come within
SAID_WITHIN_S seconds after Python and torch are loaded, the end within ENDS_WITHIN_S;
a command ends with exit code 3 and no traceback.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from titan_ckpt.saving.saver import save
from tools.hostile.outcome import Outcome

SAID_WITHIN_S, ENDS_WITHIN_S = 5.0, 30.0
PARALLEL = 4


@contextlib.contextmanager
def _listener(backlog: int = 128) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(backlog)
        yield listener


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """A port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{_port(unused)}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Connections are made, and never read or answered."""
    with _listener() as listener:
        yield f"http://127.0.0.1:{_port(listener)}"


@contextlib.contextmanager
def silent_tls() -> Iterator[str]:
    """As `silent`; the client wants TLS first."""
    with silent() as endpoint:
        yield endpoint.replace("http:", "https:")


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Packets are dropped: the queue of connections is full, so the kernel answers no more of them (Linux)."""
    with _listener(backlog=0) as listener, contextlib.ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{_port(listener)}"


@contextlib.contextmanager
def no_such_name() -> Iterator[str]:
    """A name that no resolver knows (RFC 6761)."""
    yield "http://s3.invalid:9000"


@contextlib.contextmanager
def plain_behind_tls() -> Iterator[str]:
    """A server that answers plain HTTP, and a client that wants TLS."""
    with _listener() as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the listener is closed at the end
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield f"https://127.0.0.1:{_port(listener)}"
        listener.shutdown(socket.SHUT_RDWR)


ENDPOINTS: dict[str, Callable[[], contextlib.AbstractContextManager[str]]] = {
    "connection refused": refusing,
    "unknown host name": no_such_name,
    "TLS to a plain port": plain_behind_tls,
    "no answer": silent,
    "no answer to TLS": silent_tls,
    "packets dropped": black_hole,
}
_LOADED = """
import sys, torch, torch.distributed.checkpoint, botocore.session, titan_ckpt
from titan_ckpt.cli.main import main
from titan_ckpt.store import s3
save, open_checkpoint = titan_ckpt.save, titan_ckpt.open_checkpoint
print("loaded", file=sys.stderr, flush=True)
"""
_PROGRAMS = {
    "ls": "sys.exit(main(['ls', 's3://b/run']))",
    "verify": "sys.exit(main(['verify', 's3://b/run@3']))",
    "inspect": "sys.exit(main(['inspect', 's3://b/run']))",
    "prune": "sys.exit(main(['prune', 's3://b/run', '--keep-last', '1']))",
    "cp to it": "sys.exit(main(['cp', 'RUN@1', 's3://b/run']))",
    "reshard to it": "sys.exit(main(['reshard', 'RUN@1', 's3://b/run', '--mesh', 'dp_shard=2']))",
    "save": "save('s3://b/run', {'w': torch.zeros(9)}, step=1)",
    "open_checkpoint": "open_checkpoint('s3://b/run')",
}


@dataclass(frozen=True, slots=True)
class _Seen:
    said_s: float
    ended_s: float
    code: int
    text: str


def _watch(program: str, endpoint: str) -> _Seen:
    """Run a program; when its first line came, and when it ended, after Python and torch were loaded."""
    keys = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    environment = {**os.environ, **keys, "AWS_REGION": "us-east-1"}
    command = [sys.executable, "-c", _LOADED + program]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        while running.stderr.readline() not in ("loaded\n", ""):
            pass
        started = time.monotonic()
        first = running.stderr.readline()
        said_s = time.monotonic() - started
        text = first + running.stderr.read()
    return _Seen(said_s, time.monotonic() - started, running.returncode, text)


def run_dead_endpoints(seed: int, seconds: float) -> Outcome:  # noqa: ARG001 - every case, whatever seed and time
    """Every program against every dead endpoint."""
    outcome = Outcome(part="dead endpoints")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run = os.path.join(folder, "run")
        save(run, {"w": torch.zeros(9)}, step=1)
        urls = {name: stack.enter_context(endpoint()) for name, endpoint in ENDPOINTS.items()}
        cases = [(where, what) for what in _PROGRAMS for where in urls]
        watch = lambda case: _watch(_PROGRAMS[case[1]].replace("RUN", run), urls[case[0]])
        with ThreadPoolExecutor(PARALLEL) as pool:
            for (where, what), seen in zip(cases, pool.map(watch, cases), strict=True):
                _judge(outcome, f"{what}: {where}", seen)
                for name, found in (("said", seen.said_s), ("ended", seen.ended_s)):
                    key = f"{where}: {name} after at most, ms"
                    outcome.counts[key] = max(outcome.counts[key], int(1000 * found))
    return outcome


def _judge(outcome: Outcome, case: str, seen: _Seen) -> None:
    outcome.cases += 1
    is_command = "save:" not in case and "open_checkpoint:" not in case
    if seen.said_s > SAID_WITHIN_S:
        outcome.failures.append(f"{case}: said nothing for {seen.said_s:.1f} s")
    if seen.ended_s > ENDS_WITHIN_S:
        outcome.failures.append(f"{case}: took {seen.ended_s:.1f} s")
    if is_command and (seen.code != 3 or "Traceback" in seen.text):
        outcome.failures.append(f"{case}: exit code {seen.code}: {seen.text[-300:]}")
