"""A pool of real ranks over gloo: processes that run one function after another, forked from one that has imported torch.

    with RankPool(4) as pool:
        results = pool.run(function, argument)     # function(rank, argument) on every rank, results in order of rank

`function` is a module-level function of a test module. An exception on a rank is raised in the caller with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from titan_ckpt.demo.ports import free_port

TIMEOUT_S = 120.0
PRELOADED = ["torch", "titan_ckpt.trainer.job.loop"]  # takes 4 s of a core, once for all pools of a process


class RankPool:
    """`world_size` processes in one gloo process group; each must answer within `timeout_s`."""

    def __init__(self, world_size: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            environment = _environment(rank, world_size, port)
            process = context.Process(target=_serve, args=(environment, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(rank, *arguments)` on every rank; results in rank order."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [self._receive(rank) for rank in range(len(self._pipes))]
        failures = [f"rank {rank}:\n{text}" for rank, (is_fine, text) in enumerate(answers) if not is_fine]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def _receive(self, rank: int) -> Any:
        if not self._pipes[rank].poll(self._timeout_s):
            self.close()
            raise AssertionError(f"rank {rank} did not answer in {self._timeout_s} s")
        return self._pipes[rank].recv()

    def kill(self) -> None:
        """SIGKILL every rank, whatever it does; a `run` under way on another thread raises EOFError."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            if not pipe.closed:
                pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """That of this process, which may have changed since the fork server started, with the names that torch reads."""
    named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    return {**os.environ, **named, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}


def _serve(environment: dict[str, str], pipe: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from titan_ckpt.trainer.device_mesh import one_thread_groups

    torch.set_num_threads(1)
    with one_thread_groups():
        dist.init_process_group("gloo")
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(int(environment["RANK"]), *arguments))
        except BaseException:  # noqa: BLE001  (the test raises it)
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    os._exit(0)
