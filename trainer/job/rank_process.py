"""This process as one rank of a job: its identity, device, torch.distributed, the recorder of hangs, garbage collection."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_ckpt.debug.record.recorder import Recorder, environment
from titan_ckpt.errors import ConfigError, TitanError
from titan_ckpt.format.names import DEBUG
from titan_ckpt.location import join
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.device_mesh import BACKENDS, one_thread_groups
from titan_ckpt.trainer.job.stop_signals import StopRequest
from titan_ckpt.trainer.launch.launch import NEW_STORE
from titan_ckpt.trainer.report.logs import RunFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """Which of the job's processes this one is."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @staticmethod
    def from_environment() -> RankProcess:
        """Read the variables that torchrun and our launcher set; a single rank if they are unset."""
        rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
        world_size = os.environ.get("WORLD_SIZE", "1")
        return RankProcess(rank=int(rank), local_rank=int(local_rank), world_size=int(world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What is fixed for this rank before anything is built."""

    config: TrainConfig
    process: RankProcess
    mesh: MeshSpec
    device: torch.device
    folder: RunFolder

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.process.rank


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank; `auto` takes an accelerator if there is one."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError('train.device = "cuda", but torch sees no accelerator here; use "auto" or "cpu"')
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(context: RankContext) -> Iterator[None]:
    """Initialise torch.distributed, and destroy it on exit. A single rank's group is made later, with its mesh."""
    timeout = timedelta(seconds=context.config.train.init_timeout_s)
    added = {name: value for name, value in environment().items() if name not in os.environ}
    os.environ.update(added)
    try:
        if context.process.world_size > 1:
            _join(context.process, BACKENDS[context.device.type], timeout)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in added:
            os.environ.pop(name, None)


def _join(process: RankProcess, backend: str, timeout: timedelta) -> None:
    try:
        with one_thread_groups():
            rank, size = process.rank, process.world_size
            dist.init_process_group(backend, timeout=timeout, store=attempt_store(timeout), rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        where = (
            f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
        )
        raise TitanError(
            f"cannot connect to the other {process.world_size - 1} ranks at {where}: {str(error).splitlines()[0]}. "
            "Give torchrun a free --master-port that all machines reach, or start without RANK and WORLD_SIZE in the environment"
        ) from error


def attempt_store(timeout: timedelta) -> dist.Store | None:
    """The store of this attempt where torchrun gives all of them the same one, in which ranks would find the addresses of those
    before them; None to leave it to torch.

    torch 2.13, torch/distributed/elastic/rendezvous/dynamic_rendezvous.py (`use_agent_store`). Only the ranks of one node know
    that their attempts have the same number.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("GROUP_WORLD_SIZE") != "1":
        if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
            log.warning("%s is not set for torchrun: ranks that it starts again may not find each other", NEW_STORE)
        return None
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def start_recorder(context: RankContext, stop: StopRequest) -> Recorder | None:
    """Start the recorder of hangs, in a folder named after this attempt; None if it is switched off."""
    config, process, folder = context.config, context.process, context.folder
    if not config.debug.recorder:
        return None
    incident = _incident_name(process)
    upload = None
    if config.save.url and not folder.is_at(config.save.url):
        upload = join(config.save.url, DEBUG, incident)
    try:
        return Recorder.start(
            os.path.join(folder.debug, incident), rank=process.rank, world_size=process.world_size, upload=upload,
            coordinates=context.mesh.coordinate(process.rank), stall_s=config.debug.stall_s, on_signal=stop.request,
        )  # fmt: skip
    except OSError as error:
        log.error("no recorder of hangs: %s: %s; training goes on without it", error.filename, error.strerror)
        return None


def _incident_name(process: RankProcess) -> str:
    """The UTC start time of this attempt, the same on every rank, so that names sort by time."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if process.world_size == 1:
        return name
    store = dist.distributed_c10d._get_default_store()
    if process.rank == 0:
        store.set("titan-ckpt/incident", name)
    return store.get("titan-ckpt/incident").decode()


@contextmanager
def determinism(is_wanted: bool) -> Iterator[None]:
    """Within, operations whose results vary from run to run raise, if `is_wanted`."""
    before = torch.are_deterministic_algorithms_enabled()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=is_warning)


class Collector:
    """Runs Python's garbage collector every `every` steps, as a context manager; 0 leaves it alone.

    By default it runs whenever a rank has allocated enough objects: each rank pauses at a different step, and all ranks wait
    each time. Objects that exist when training begins (modules, the model) are frozen and never scanned again.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled = False

    def __enter__(self) -> Collector:
        if self._every:
            self._was_enabled = gc.isenabled()
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after(self, step: int) -> None:
        """Collect if it is due after `step`."""
        if self._every and step % self._every == 0:
            gc.collect()
