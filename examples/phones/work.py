"""What a peer does in one crew: meet, go through the pipeline, leave. Imports torch, so it runs in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from examples.phones.desk import Call
from examples.phones.progress import AXIS, Crew, Regroup
from examples.phones.settings import AGAIN, DONE, FAILED, FILES, LABELS, UNFIT, Settings
from examples.phones.stages import Album, run_pipeline
from examples.phones.store import PeersStore
from titan_ckpt import TitanError, open_store
from titan_ckpt.errors import DataError, StoreError, UsageError

log = logging.getLogger(__name__)


def work(settings: Settings, call: Call, knock: Event, reason: Connection) -> None:
    """The life of a crew on this peer; ends the process. A lost peer shows as an error of gloo or of titan-ckpt.

    What would fail in every crew, such as a picture that cannot be read, ends in UNFIT, with a message in `reason`.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    rank = call.members.index(settings.address)

    def give_up(error: Exception) -> None:
        reason.send(str(error) if isinstance(error, TitanError) else f"{type(error).__name__}: {error}")
        os._exit(UNFIT)

    try:
        crew = _meet(settings, call, rank, knock, give_up)
        album = Album(pictures=settings.pictures, block=settings.choices.block)
        labels = run_pipeline(crew, album, settings.choices)
        (settings.home / LABELS).write_text(json.dumps(labels))
        crew.report("done")
        code = DONE
    except Regroup:
        code = AGAIN
    except (DataError, UsageError) as error:
        give_up(error)
    except (RuntimeError, TitanError, ConnectionError, TimeoutError) as error:
        log.warning("generation %d, rank %d: the crew has failed: %s", call.generation, rank, error, exc_info=True)
        code = FAILED
    except Exception as error:
        log.exception("generation %d, rank %d: not the fault of a lost peer", call.generation, rank)
        give_up(error)
    sys.stderr.flush()
    os._exit(code)  # no farewell to peers that may be gone


def _meet(settings: Settings, call: Call, rank: int, knock: Event, give_up: Callable[[StoreError], None]) -> Crew:
    """Join the process group; RuntimeError if not all members come."""
    torch.set_num_threads(1)
    host = call.members[0].rpartition(":")[0]
    dist.init_process_group(
        "gloo", init_method=f"tcp://{host}:{call.rendezvous_port}", rank=rank, world_size=len(call.members),
        timeout=timedelta(seconds=settings.timeout_s),
    )  # fmt: skip
    own = open_store(str(settings.home / FILES))
    others = [call.members[(rank + step) % len(call.members)] for step in range(1, len(call.members))]
    started = time.process_time()

    def open_stage(name: str) -> PeersStore:
        store = PeersStore(own, settings.address, others, name, on_fault=give_up)
        store.spread()
        return store

    def report(event: str, **details: Any) -> None:
        entry = {"event": event, "time": time.time(), "cpu_s": time.process_time() - started, **details}
        print(json.dumps(entry | {"generation": call.generation, "rank": rank, "size": len(call.members)}), flush=True)  # noqa: T201

    report("met")
    return Crew(
        mesh=init_device_mesh("cpu", (len(call.members),), mesh_dim_names=(AXIS,)),
        open_store=open_stage, is_knocked=knock.is_set, report=report,
        save_every_s=settings.save_every_s, timeout_s=settings.timeout_s,
    )  # fmt: skip
