"""Jobs that are killed in the middle of a save to S3, at a moment that a proxy before the server decides."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest

from titan_ckpt.demo.s3_server import Server
from tools.faults.proxy import FaultyProxy, HttpRequest, RequestFault, RequestFaultKind
from tools.rank_pool import RankPool

REACHED_WITHIN_S = 200.0


def kill_while_writing(
    server: Server, name: str, function: Callable[..., Any], *arguments: Any, num_ranks: int = 1
) -> None:
    """Run `function(rank, *arguments)` until a rank writes an object whose name matches `name`; SIGKILL every rank.

    The server never gets that request. A job of one rank costs the least; it has a process group all the same.
    """
    is_writing = threading.Event()

    def rule(request: HttpRequest) -> RequestFault | None:
        if request.method != "PUT" or not re.search(name, request.path):
            return None
        is_writing.set()
        return RequestFault(kind=RequestFaultKind.HANG, seconds=REACHED_WITHIN_S)

    host, _, port = server.endpoint.removeprefix("http://").partition(":")
    with FaultyProxy(host, int(port)) as proxy, ThreadPoolExecutor(1) as thread:
        proxy.rule = rule
        environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
        with patch.dict(os.environ, environment), RankPool(num_ranks, timeout_s=REACHED_WITHIN_S) as ranks:
            running = thread.submit(ranks.run, function, *arguments)
            running.add_done_callback(lambda _: is_writing.set())
            assert is_writing.wait(REACHED_WITHIN_S)
            assert not running.done() or running.exception() is None, running.exception()
            ranks.kill()
            with pytest.raises((EOFError, ConnectionResetError)):
                running.result()
