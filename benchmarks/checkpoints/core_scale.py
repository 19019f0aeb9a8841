"""Open and commit a checkpoint of 1,024 ranks x 873 sharded tensors (the coordinator's part). No data moves.

python benchmarks/checkpoints/core_scale.py [--ranks 1024] [--tensors 873] [--rounds 3]
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.format.commit import write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.manifest import FileEntry, Manifest
from titan_ckpt.format.manifest_json import encode_manifest
from titan_ckpt.format.names import data_file, new_attempt, step_folder
from titan_ckpt.format.torch_blob import align, envelope
from titan_ckpt.saving.merge_parts import merge_parts
from titan_ckpt.saving.options import SaveAttempt, SaveRequest
from titan_ckpt.saving.upload import RankPart
from titan_ckpt.saving.writers import Share, divide
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.local_shard import LocalShard
from titan_ckpt.store.local import FileStore
from tools.report import Measurement, median, spread, timed, write_section


def items_of(rank: int, ranks: int, tensors: int) -> list[LocalShard]:
    """The shards that one FSDP rank holds of a 70B-shaped model and its moments."""
    rows = 8
    return [
        LocalShard(
            fqn=f"t.{n:04d}.weight",
            dtype="float32",
            global_shape=(rows * ranks, 8192),
            placements=(("dp_shard", 0),),
            offsets=(rows * rank, 0),
            sizes=(rows, 8192),
        )
        for n in range(tensors)
    ]


def part_of(rank: int, items: list[LocalShard], attempt: str) -> RankPart:
    rows, end = [], 0
    for item in items:
        around = envelope(item.dtype, item.sizes)
        rows.append((0, align(end), around.length, len(around.prefix), around.payload_length, 0))
        end = align(end) + around.length
    return RankPart(
        files=(FileEntry(path=data_file(attempt, rank), size_bytes=end, digest=bytes(16)),),
        columns=np.array(rows, dtype=np.int64), digests=np.random.default_rng(rank).bytes(16 * len(items)), objects=(),
        all_object_digests={}, copy_digests=[], written_bytes=end, raw_bytes=end,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of each round, by commit step, and of opening the result."""

    merges: list[float] = field(default_factory=list)
    pickles: list[float] = field(default_factory=list)
    commits: list[float] = field(default_factory=list)
    opens: list[float] = field(default_factory=list)


def make_files(folder: str, parts: list[RankPart]) -> None:
    """Create sparse files of the right size, which `open` accepts as a complete checkpoint."""
    for part in parts:
        path = Path(folder, step_folder(1), part.files[0].path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(part.written_bytes)


def measure(attempt: SaveAttempt, parts: list[RankPart], share: Share, rounds: int) -> tuple[Times, Manifest, bytes]:
    """Commit and open `rounds` times; return the times and the last commit."""
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        make_files(folder, parts)
        store = FileStore(folder)
        for _ in range(rounds):
            manifest = merge_parts(attempt, parts, share)
            times.merges.append(timed(lambda: merge_parts(attempt, parts, share)))
            times.pickles.append(timed(partial(dcp_metadata, manifest)))
            metadata = dcp_metadata(manifest)
            times.commits.append(timed(partial(write_commit, store, manifest, metadata, replaces=None)))
            times.opens.append(timed(lambda: open_checkpoint(folder)))
            store.delete([f"{step_folder(1)}/COMMIT.json"])
    return times, manifest, metadata


def bars_of(times: Times, manifest: Manifest, metadata: bytes) -> list[Measurement]:
    """The rows, beside the pickle that DCP writes and reads."""
    peers: list[Metadata] = []
    peer_open_s = timed(lambda: peers.append(pickle.loads(metadata)))  # noqa: S301  (written by this script)
    peer_dump_s = timed(lambda: pickle.dumps(peers[0]))
    size_mb = len(encode_manifest(manifest).manifest) / 1e6
    steps = median(times.merges), median(times.pickles), median(times.commits)
    commit_s = sum(steps)
    return [
        Measurement(
            what="opening it", figure=spread(times.opens), bar="<= 0.3 s", holds=median(times.opens) <= 0.3,
            peer=f"pickle.load of .metadata {peer_open_s:.1f} s",
        ),
        Measurement(
            what="manifest", figure=f"{size_mb:.2f} MB", bar="<= 10 MB", holds=size_mb <= 10,
            peer=f".metadata {len(metadata) / 1e6:.0f} MB",
        ),
        Measurement(
            what="commit on the coordinator: merge, .metadata, files",
            figure=f"{commit_s:.2f} s ({steps[0]:.2f} + {steps[1]:.2f} + {steps[2]:.2f})",
            bar="<= 2 s", holds=commit_s <= 2, peer=f"pickle.dump of .metadata alone {peer_dump_s:.1f} s",
        ),
    ]  # fmt: skip


def main() -> None:
    """Measure and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=873)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    mesh = MeshSpec.of({"dp_shard": arguments.ranks})
    held = [items_of(rank, arguments.ranks, arguments.tensors) for rank in range(arguments.ranks)]
    shares: list[Share] = []
    divide_s = timed(lambda: shares.append(divide(held, [[]] * arguments.ranks, mesh)))
    attempt = new_attempt()
    parts = [part_of(rank, items, attempt) for rank, items in enumerate(held)]
    save_attempt = SaveAttempt(name=attempt, request=SaveRequest(step=1), mesh=mesh)
    times, manifest, metadata = measure(save_attempt, parts, shares[0], arguments.rounds)
    bars = bars_of(times, manifest, metadata)
    notes = f"Division of the work, once per shape of the state: {divide_s:.1f} s. `.metadata` is {len(metadata) / 1e6:.0f} MB."
    title = f"The index of {arguments.ranks:,} ranks x {arguments.tensors} sharded tensors"
    write_section("core-scale", title, bars, notes)


if __name__ == "__main__":
    main()
