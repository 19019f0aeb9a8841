"""Gloo groups that run their operations on one thread each.

torch gives a gloo group two threads per device. Both write the name of the operation just done into one `std::string`, outside
the group's lock (`ProcessGroupGloo::runLoop`, `lastCompletedWorkName`; in torch 2.13, the Flight Recorder on or off). Names that
need the heap, as a functional all-gather's does, are then freed twice now and then: most loops of functional collectives died
of SIGSEGV or SIGABRT within three million of them (`scripts/gloo_threads.py`), and a training run's rank once in some thousand
runs. With one thread there is one writer. torch hands options to NCCL groups only, so the class that makes gloo groups is
exchanged while groups are made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

INTERFACES = "GLOO_SOCKET_IFNAME"


@contextmanager
def one_thread_groups() -> Iterator[None]:
    """Gloo groups that are made inside have one thread each; other backends are as they were."""
    if not dist.is_gloo_available():
        yield
        return
    module: Any = distributed_c10d
    gloo = module.ProcessGroupGloo

    def start(group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, _devices(gloo)
        for name, value in more.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        gloo.__init__(group, store, rank, size, options)

    module.ProcessGroupGloo = type("OneThreadGloo", (gloo,), {"__init__": start})
    try:
        yield
    finally:
        module.ProcessGroupGloo = gloo


def _devices(gloo: Any) -> list[Any]:
    """The devices that torch takes when it is given a timeout alone."""
    named = [name for name in os.environ.get(INTERFACES, "").split(",") if name]
    return [gloo.create_device(interface=name) for name in named] or [gloo.create_default_device()]
