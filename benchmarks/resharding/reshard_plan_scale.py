"""Planning time and memory for Llama 3.1 405B with Adam: real names and shapes, no data.

python -m benchmarks.resharding.reshard_plan_scale            all cases, each in its own process
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.format.manifest import DIGEST_BYTES, RAW, ChunkTable, FileEntry, Manifest, TensorEntry
from titan_ckpt.format.names import data_file
from titan_ckpt.resharding.estimate import estimate_reshard
from titan_ckpt.resharding.reshard import DEFAULT_MEMORY, plan_reshard
from titan_ckpt.resharding.target import Placer, lay_out
from titan_ckpt.rewrite.memory import Budget
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineSpec, stage_table
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.store.local import FileStore
from tools.report import Measurement, write_section

LAYERS, DIM, HIDDEN, VOCABULARY, KV_DIM = 126, 16384, 53248, 128256, 1024
CASES = {
    "16384 -> 8192 ranks": ("pp=16,dp_shard=128,tp=8", "pp=8,dp_shard=128,tp=8"),
    "16384 -> 8192 ranks, all of it FSDP": ("dp_shard=2048,tp=8", "dp_shard=1024,tp=8"),
    "1024 -> 512 ranks": ("pp=4,dp_shard=32,tp=8", "pp=4,dp_shard=16,tp=8"),
    "1024 -> 512 ranks, rows only": ("dp_shard=1024", "dp_shard=512"),
}
LIMIT_GB = 2
TITLE = "Planning to reshard Llama 3.1 405B with Adam"
NOTES = """Real names and shapes, no data; one core. The time is that of the whole plan: laying out the target, grouping, and
estimating the traffic; the memory is the process's peak, the source's index included. The last column is no peer: no other
tool plans this."""
ATTEMPT = "a-20260101T000000Z-00000000"


def parameters() -> Iterator[tuple[str, Shape]]:
    """Names and shapes of Llama 3.1 405B."""
    yield "model.embed_tokens.weight", (VOCABULARY, DIM)
    for layer in range(LAYERS):
        head = f"model.layers.{layer}"
        yield f"{head}.self_attn.q_proj.weight", (DIM, DIM)
        yield f"{head}.self_attn.k_proj.weight", (KV_DIM, DIM)
        yield f"{head}.self_attn.v_proj.weight", (KV_DIM, DIM)
        yield f"{head}.self_attn.o_proj.weight", (DIM, DIM)
        yield f"{head}.mlp.gate_proj.weight", (HIDDEN, DIM)
        yield f"{head}.mlp.up_proj.weight", (HIDDEN, DIM)
        yield f"{head}.mlp.down_proj.weight", (DIM, HIDDEN)
        yield f"{head}.input_layernorm.weight", (DIM,)
        yield f"{head}.post_attention_layernorm.weight", (DIM,)
    yield "model.norm.weight", (DIM,)
    yield "lm_head.weight", (VOCABULARY, DIM)


def with_adam(parameters: Iterable[tuple[str, Shape]]) -> Iterator[tuple[str, Shape]]:
    """A model and its Adam state."""
    for fqn, shape in parameters:
        yield f"model.{fqn}", shape
        yield f"optimizer.state.{fqn}.exp_avg", shape
        yield f"optimizer.state.{fqn}.exp_avg_sq", shape
        yield f"optimizer.state.{fqn}.step", ()


def source(mesh: MeshSpec, state: Iterable[tuple[str, Shape]], layers: int) -> Checkpoint:
    """The index of a checkpoint of such tensors, in float32, as a trainer on `mesh` would have saved it."""
    spec = PipelineSpec(num_layers=layers, layers_per_stage=None)
    stages = stage_table(spec, mesh.degree("pp")) if mesh.degree("pp") > 1 else None
    placer = Placer(source=None, target=mesh, stages=stages)
    entries = [
        TensorEntry(
            fqn=fqn, dtype="float32", global_shape=shape, placements=None, stages=None, first_chunk=0, num_chunks=0
        )
        for fqn, shape in sorted(state)
    ]  # fmt: skip
    target = lay_out([(entry, placer.place(entry)) for entry in entries], [], mesh, data_file(ATTEMPT, 0))
    sizes = target.file_bytes().tolist()
    files = tuple(FileEntry(path=data_file(ATTEMPT, r), size_bytes=s, digest=None) for r, s in enumerate(sizes))
    table_columns = target.table
    chunks = ChunkTable(
        file=target.rank, offset=table_columns.offset, length=table_columns.length,
        payload_offset=table_columns.payload_offset, payload_length=table_columns.payload_length,
        codec=table_columns.codec, box_offsets=table_columns.box_offsets, box_sizes=table_columns.box_sizes,
        digests=bytes(DIGEST_BYTES) * len(target.rank),
    )  # fmt: skip
    manifest = Manifest(
        step=1, attempt=ATTEMPT, kind=CheckpointKind.FULL, created="", versions={}, mesh=mesh, pipeline=spec.to_dict(),
        tensors=target.tensors, chunks=chunks, codecs=(RAW,), objects=(), files=files,
    )  # fmt: skip
    store = FileStore(tempfile.gettempdir())
    return Checkpoint(store=store, url=str(store), step=1, folder="step-00000001", manifest=manifest)


def measure(name: str) -> dict[str, object]:
    """Run one case in this process."""
    before, after = (MeshSpec.parse(text) for text in CASES[name])
    return {"case": name} | plan_facts(source(before, with_adam(parameters()), LAYERS), after)


def plan_facts(checkpoint: Checkpoint, after: MeshSpec) -> dict[str, Any]:
    """Plan the reshard of a checkpoint: seconds, counts and the peak memory of this process."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, processor = time.perf_counter(), time.process_time()
    plan = plan_reshard(checkpoint, after)
    planned = time.perf_counter()
    groups = plan.file_groups(Budget.of(DEFAULT_MEMORY, checkpoint.store, checkpoint.store).max_open_files)
    grouped = time.perf_counter()
    facts = estimate_reshard(plan, checkpoint.store, memory_bytes=DEFAULT_MEMORY)
    return {
        "source": str(checkpoint.manifest.mesh),
        "target": str(after),
        "source_chunks": len(checkpoint.manifest.chunks),
        "target_chunks": len(plan.target.rank),
        "state_tb": round(facts.needed_bytes / 1e12, 3),
        "lay_out_s": round(planned - started, 2),
        "group_s": round(grouped - planned, 2),
        "estimate_s": round(time.perf_counter() - grouped, 2),
        "total_s": round(time.perf_counter() - started, 2),
        "processor_s": round(time.process_time() - processor, 2),
        "groups": len(groups),
        "read_over_needed": round(facts.read_bytes / facts.needed_bytes, 4),
        "requests": facts.read_requests,
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "rss_with_source_gb": round(resident / 1e6, 2),
    }


def main() -> None:
    """Run each case in a fresh process, so that peaks stay separate; print one JSON line each, write the section."""
    if len(sys.argv) > 1:
        sys.stdout.write(json.dumps(measure(sys.argv[1])) + "\n")
        return
    bars = []
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks.resharding.reshard_plan_scale", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sys.stdout.write(done.stdout)
        bars.append(bar_of(json.loads(done.stdout)))
    write_section("reshard-plan-scale", TITLE, bars, NOTES)


def bar_of(facts: Mapping[str, Any]) -> Measurement:
    """Compare a case with its bars."""
    limit_s = 60 if facts["case"].startswith("16384") else 5
    holds = facts["total_s"] <= limit_s and facts["peak_rss_gb"] <= LIMIT_GB
    return Measurement(
        what=facts["case"], figure=f"{facts['total_s']:.1f} s, {facts['peak_rss_gb']:.2f} GB",
        bar=f"<= {limit_s} s, <= {LIMIT_GB} GB", holds=holds,
        peer=f"{facts['source_chunks']:,} -> {facts['target_chunks']:,} chunks, {facts['requests']:,} requests",
    )  # fmt: skip


if __name__ == "__main__":
    main()
