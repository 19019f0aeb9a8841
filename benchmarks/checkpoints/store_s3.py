"""The S3 store beside obstore and s3fs, on a private SeaweedFS server: PUT and GET of one object.

python -m benchmarks.checkpoints.store_s3 [--size 256] [--rounds 5]        needs: pip install 'titan-ckpt[s3,dev]' obstore
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial

import obstore
import s3fs
from obstore.store import S3Store as ObstoreS3

from titan_ckpt.demo.s3_server import Server, running_server
from titan_ckpt.store.open import open_store
from tools.report import Measurement, interleave, median, spread, timed, write_section

BUCKET = "bench"
PART_BYTES = 16 << 20


def cases(server: Server, size_bytes: int) -> dict[str, Callable[[], object]]:
    """The operations by name; every client gets the same bytes, part size and number of parts in flight."""
    data = memoryview(bytearray(os.urandom(size_bytes)))
    buffer = memoryview(bytearray(size_bytes))
    ours = open_store(
        f"s3://{BUCKET}/run",
        endpoint_url=server.endpoint,
        access_key=server.access_key,
        secret_key=server.secret_key,
    )
    rust = ObstoreS3(
        BUCKET, prefix="run", endpoint=server.endpoint, region="us-east-1", client_options={"allow_http": True},
        access_key_id=server.access_key, secret_access_key=server.secret_key,
    )  # fmt: skip
    aio = s3fs.S3FileSystem(endpoint_url=server.endpoint, key=server.access_key, secret=server.secret_key)
    starts = range(0, size_bytes, PART_BYTES)

    def obstore_get() -> None:
        parts = obstore.get_ranges(rust, "x", starts=list(starts), lengths=[PART_BYTES] * len(starts))
        for start, part in zip(starts, parts, strict=True):
            buffer[start : start + PART_BYTES] = memoryview(part)

    def s3fs_get() -> None:
        buffer[:] = aio.cat_file(f"{BUCKET}/run/x")

    return {
        "put": lambda: ours.write("x", [data]),
        "put obstore": lambda: obstore.put(rust, "y", data, chunk_size=PART_BYTES, max_concurrency=4),
        "put s3fs": lambda: aio.pipe_file(f"{BUCKET}/run/z", bytes(data), chunksize=PART_BYTES),
        "get": lambda: ours.read_into("x", 0, buffer),
        "get obstore": obstore_get,
        "get s3fs": s3fs_get,
    }


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(folder, [BUCKET]) as server:
        actions = cases(server, options.size << 20)
        for action in actions.values():
            action()
        processor: dict[str, list[float]] = {name: [] for name in actions}
        measured = {name: partial(run, action, processor[name]) for name, action in actions.items()}
        times = interleave(measured, rounds=options.rounds)
    bars = [bar(times, processor, verb, limit) for verb, limit in (("put", 1.15), ("get", 1.3))]
    notes = (
        "obstore is the best other client. It would be kept as a fast path from 1.2 x on; it does not reach that, so\n"
        "the store is botocore alone. Client and server share the processors, so these are ratios, not rates of a network."
    )
    write_section("store-s3", f"The S3 store, one object of {options.size} MiB on SeaweedFS", bars, notes)


def run(action: Callable[[], object], processor: list[float]) -> float:
    """Wall seconds of an action; appends this process's CPU seconds, less sensitive to load, to `processor`."""
    started = time.process_time()
    seconds = timed(action)
    processor.append(time.process_time() - started)
    return seconds


def bar(times: dict[str, list[float]], processor: dict[str, list[float]], verb: str, limit: float) -> Measurement:
    """Measure one direction beside obstore and s3fs."""
    ratio = median(times[verb]) / median(times[f"{verb} obstore"])
    return Measurement(
        what=f"{verb.upper()} / obstore",
        figure=f"{ratio:.2f} x ({spread(times[verb])}; client's processor {median(processor[verb]):.2f} s)",
        bar=f"<= {limit} x",
        holds=ratio <= limit,
        peer=f"obstore {spread(times[f'{verb} obstore'])}, processor {median(processor[f'{verb} obstore']):.2f} s; "
        f"s3fs {spread(times[f'{verb} s3fs'])}",
    )


if __name__ == "__main__":
    main()
