"""Reproduce the crash of a rank in torch's gloo threads: functional collectives in one process until a time or the crash.

    python -m scripts.gloo_threads 240            # process groups as torch creates them
    python -m scripts.gloo_threads 240 --one      # process groups as the trainer creates them

Prints the number of collectives, or dies by a signal. `one_thread_groups` in trainer/device_mesh.py explains the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import sys
import time

import torch
import torch.distributed as dist

from titan_ckpt.trainer.device_mesh import one_thread_groups

SWITCH_S = 1e-5  # between Python's threads: the window is small


def main() -> None:
    """Run the loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--one", action="store_true", help="one thread per group")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    with one_thread_groups() if options.one else contextlib.nullcontext():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    sys.stdout.write(
        f"{_loop(options.seconds, dist.group.WORLD.group_name):,} collectives in {options.seconds:g} s, no crash\n"
    )
    dist.destroy_process_group()


def _loop(seconds: float, group: str) -> int:
    ops, count = torch.ops._c10d_functional, 0
    x = torch.randn(1, 64, 64)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ops.wait_tensor(ops.all_gather_into_tensor(x[:, :32].contiguous(), 1, group))
        ops.wait_tensor(ops.reduce_scatter_tensor(torch.cat(x.chunk(2, 1)), "sum", 1, group))
        ops.wait_tensor(ops.all_reduce(x[:, ::2].contiguous(), "sum", group))
        count += 3
    return count


if __name__ == "__main__":
    main()
