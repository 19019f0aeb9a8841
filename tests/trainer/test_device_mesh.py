"""Single-threaded Gloo groups for every group of a mesh, and the timeouts of the trainer's control group."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.device_mesh import INTERFACES, init_rank_mesh, one_thread_groups, pipeline_ends
from titan_ckpt.trainer.job.control_group import ControlGroup
from tools.rank_pool import RankPool

CPU = torch.device("cpu")


def threads_of(group: dist.ProcessGroup) -> int:
    options: Any = group._get_backend(CPU).options
    return int(options._threads)


def threads_of_a_mesh(rank: int, text: str, interface: str) -> dict[str, int]:
    os.environ[INTERFACES] = interface
    mesh = init_rank_mesh(MeshSpec.parse(text), CPU)
    groups: dict[str, Any] = {name: mesh.group(name) for name in mesh.names} | {"cp": mesh.cp_group}
    groups |= {"world": dist.group.WORLD, "ends": pipeline_ends(mesh.spec)}
    for group in groups.values():
        if group is not None:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == group.size(), f"rank {rank}"
    return {name: threads_of(group) for name, group in groups.items() if group is not None}


@pytest.mark.dist
@pytest.mark.parametrize(("mesh", "interface"), [("pp=2,tp=2", ""), ("dp_shard=2,cp=2", "lo")])
def test_every_group_of_a_mesh_has_one_thread(mesh: str, interface: str) -> None:
    with RankPool(4) as pool:
        for threads in pool.run(threads_of_a_mesh, mesh, interface):
            assert len(threads) >= 4
            assert set(threads.values()) == {1}, threads


def test_timeout_is_kept_and_later_groups_are_torchs_own(tmp_path: Path) -> None:
    def start(name: str) -> None:
        timeout = timedelta(seconds=77)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path / name}", rank=0, world_size=1, timeout=timeout)

    with one_thread_groups():
        start("one")
    try:
        assert dist.group.WORLD is not None
        assert threads_of(dist.group.WORLD) == 1
        assert dist.group.WORLD._get_backend(CPU).options._timeout == timedelta(seconds=77)
    finally:
        dist.destroy_process_group()
    start("two")
    try:
        assert dist.group.WORLD is not None
        assert threads_of(dist.group.WORLD) > 1
    finally:
        dist.destroy_process_group()


def impatience(rank: int) -> float:
    """Seconds until rank 0 gives up on rank 1, which is alive but never joins the reduction."""
    control = ControlGroup(timeout_s=600.0)
    control.set_timeout(1.0)
    assert control.all_reduce_max([float(rank)]) == [1.0]
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            control.all_reduce_max([0.0])
    return time.monotonic() - started


def patience(rank: int) -> list[float]:
    """The maximum over the ranks; rank 1 joins later than a time limit that was set and then removed."""
    control = ControlGroup(timeout_s=600.0)
    control.set_timeout(1.0)
    control.set_timeout(None)
    if rank == 1:
        time.sleep(3.0)
    return control.all_reduce_max([float(rank)])


@pytest.mark.dist
def test_the_control_group_waits_as_long_as_its_timeout() -> None:
    with RankPool(2) as pool:
        assert pool.run(patience) == [[1.0], [1.0]]
        assert pool.run(impatience)[0] < 100.0
