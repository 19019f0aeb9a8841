"""Running the tests of one file: each in a process of its own, its ranks forked from there."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import types
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from tools.peer_tests.on_cpu import NUM_DEVICES, on_cpu
from tools.peer_tests.storages import USES, put_in_place

FORK = multiprocessing.get_context("fork")
PASSED, SKIPPED, FAILED, HUNG = "passed", "skipped", "FAILED", "hung"

_NOISE = (
    "To execute this test",
    "This message can be suppressed",
    "exited with error code",
    "Connection closed by peer",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a test; `detail` is the error, or the reason of a skip, `uses` how often it reached our storage."""

    test: str
    result: str
    detail: str = ""
    uses: int = 0


def run_file(path: Path, *, storage: str, part: str, timeout_s: float) -> list[Outcome]:
    """Run the tests in `path` whose names contain `part`; `storage` is one of `STORAGES`."""
    return _in_child(_run_here, (path, storage, part, timeout_s), None) or [
        Outcome(test=path.stem, result=FAILED, detail="the file's process died")
    ]


def _in_child(action: Any, arguments: tuple[Any, ...], timeout_s: float | None) -> Any:
    """What `action` returns in a forked process; None if that dies or takes too long. Its own children end with it."""
    receiving, sending = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_answer, args=(sending, action, arguments))
    process.start()
    sending.close()
    try:
        return receiving.recv() if receiving.poll(timeout_s) else None
    except EOFError:
        return None
    finally:
        _end_group(process.pid or 0)
        process.join()


def _end_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(leader, signal.SIGKILL)  # it has not made its group yet


def _answer(sending: Connection, action: Any, arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    sending.send(action(*arguments))


def _run_here(path: Path, storage: str, part: str, timeout_s: float) -> list[Outcome]:
    try:
        module = _module(path, storage)
    except Exception as error:  # noqa: BLE001  (reported)
        return [Outcome(test=path.stem, result=FAILED, detail=f"import: {type(error).__name__}: {error}")]
    outcomes = []
    for test in _tests(unittest.defaultTestLoader.loadTestsFromModule(module)):
        name = ".".join(test.id().split(".")[-2:])
        if part in f"{path.stem}.{name}":
            USES.value = 0
            found = _in_child(_run_one, (test,), timeout_s) or (HUNG, f"no answer within {timeout_s:.0f} s")
            outcomes.append(Outcome(test=f"{path.stem}.{name}", result=found[0], detail=found[1], uses=USES.value))
    return outcomes


def _module(path: Path, storage: str) -> types.ModuleType:
    """The test file as a module, on the CPU, with `storage` in place of torch's."""
    put_in_place(storage)
    _prepare_torch()
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    exec(compile(on_cpu(path), str(path), "exec"), module.__dict__)
    return module


def _prepare_torch() -> None:
    """Ranks are forked, not spawned: that takes no seconds of imports. FSDP and sharded tensors are on the CPU."""
    if importlib.util.find_spec("expecttest") is None:  # torch's test cases derive from its, and use nothing of it here
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_distributed, common_fsdp  # import expecttest
    from torch.testing._internal.distributed._shard import sharded_tensor

    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # its pool of processes does not survive a fork
    torch.set_num_threads(1)
    case: Any = common_distributed.MultiProcessTestCase
    replaced = {
        (common_distributed, "TIMEOUT_DEFAULT"): 10_000,
        (common_fsdp, "DEVICE_COUNT"): NUM_DEVICES,
        (case, "_spawn_processes"): lambda self: self._start_processes(FORK.Process),
    }
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    del common_fsdp.FSDPTest._run  # which asks for GPUs, unlike the one of its base class
    made: Any = FullyShardedDataParallel.__init__

    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("device_id", torch.device("cpu"))
        made(self, *args, **kwargs)

    FullyShardedDataParallel.__init__ = on_the_cpu  # type: ignore[method-assign]
    with_comms: Any = sharded_tensor.with_comms

    def over_gloo(func: Any = None, init_rpc: bool = True, backend: str = "gloo") -> Any:
        return with_comms(func, init_rpc=init_rpc, backend=backend)

    sharded_tensor.with_comms = over_gloo


def _tests(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _tests(each)
        else:
            yield each


def _run_one(test: unittest.TestCase) -> tuple[str, str]:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return SKIPPED, result.skipped[0][1]
    wrong = [*result.errors, *result.failures]
    return (FAILED, _reason(wrong[0][1])) if wrong else (PASSED, "")


def _reason(traceback: str) -> str:
    """The lines of a traceback that say what went wrong."""
    lines = [
        line.strip() for line in traceback.splitlines() if line and not line.startswith((" ", "Traceback", "frame"))
    ]
    return " | ".join(dict.fromkeys(line for line in lines if not any(each in line for each in _NOISE)))[:1500]
