"""Manifest, opening and planning for DeepSeek-V3 with Adam: real names and shapes, no data.

python -m benchmarks.resharding.expert_plan_scale
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.resharding.reshard_plan_scale import LIMIT_GB, plan_facts, source, with_adam
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.converters.models.families import expected_tensors
from titan_ckpt.converters.models.spec import Experts, Latent, ModelSpec
from titan_ckpt.format.commit import write_commit
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.manifest_json import encode_manifest
from titan_ckpt.format.names import step_folder
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.placement import Shape
from titan_ckpt.store.local import FileStore
from tools.report import Measurement, write_section

EXPERTS = Experts(
    number=256, per_token=8, ffn_dim=2048, scores="sigmoid", correction_bias=True, groups=8, groups_per_token=4, scale=2.5,
    shared=1, dense_layers=3,
)  # fmt: skip
DEEPSEEK_V3 = ModelSpec(
    family="deepseek_v3", vocab_size=129280, dim=7168, n_layers=61, n_heads=128, n_kv_heads=128, head_dim=192, ffn_dim=18432,
    norm_eps=1e-6, rope_theta=1e4, max_seq_len=4096, latent=Latent(kv_rank=512, q_rank=1536), experts=EXPERTS,
)  # fmt: skip
BEFORE, AFTER = "pp=16,ep=64", "pp=8,ep=32"
LIMIT_S, LIMIT_MB, OPEN_S = 60, 20, 0.5
OPENED = 5
TITLE = "DeepSeek-V3 with Adam, 671 B parameters: manifest, opening, planning"
NOTES = f"""Real names and shapes, no data; {BEFORE} to {AFTER}, 1,024 to 256 ranks; the experts of a layer in one tensor, as
the trainer has them. Seconds are those of the processor, on a machine that others used too; opening is the least of {OPENED}
times. The memory is the process's peak, the source's index included."""


def parameters() -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the model."""
    spec, made = DEEPSEEK_V3, set()
    for fqn, shape in expected_tensors(spec).items():
        layer, inside, _ = fqn.partition("mlp.experts.")
        if not inside:
            yield fqn, shape
        elif layer not in made:
            made.add(layer)
            yield f"{layer}mlp.experts.gate_up_proj", (EXPERTS.number, 2 * EXPERTS.ffn_dim, spec.dim)
            yield f"{layer}mlp.experts.down_proj", (EXPERTS.number, spec.dim, EXPERTS.ffn_dim)


def committed(checkpoint: Checkpoint, folder: str) -> float:
    """Write the index of `checkpoint` beside sparse files; the least processor seconds of opening it."""
    manifest = checkpoint.manifest
    for file in manifest.files:
        path = Path(folder, step_folder(1), file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as sparse:
            sparse.truncate(file.size_bytes)
    write_commit(FileStore(folder), manifest, dcp_metadata(manifest), replaces=None)
    times = []
    for _ in range(OPENED):
        started = time.process_time()
        open_checkpoint(folder)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    """Measure; print the facts as JSON, write the section."""
    checkpoint = source(MeshSpec.parse(BEFORE), with_adam(parameters()), DEEPSEEK_V3.n_layers)
    facts = plan_facts(checkpoint, MeshSpec.parse(AFTER))
    sys.stdout.write(json.dumps(facts) + "\n")
    size_mb = len(encode_manifest(checkpoint.manifest).manifest) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        open_s = committed(checkpoint, folder)
    seconds, peak = facts["processor_s"], facts["peak_rss_gb"]
    bars = [
        Measurement(
            what="plan", figure=f"{seconds:.1f} s, {peak:.2f} GB", bar=f"<= {LIMIT_S} s, <= {LIMIT_GB} GB",
            holds=seconds <= LIMIT_S and peak <= LIMIT_GB,
            peer=f"{facts['source_chunks']:,} -> {facts['target_chunks']:,} chunks",
        ),
        Measurement(what="manifest", figure=f"{size_mb:.2f} MB", bar=f"<= {LIMIT_MB} MB", holds=size_mb <= LIMIT_MB),
        Measurement(what="opening", figure=f"{open_s:.2f} s", bar=f"<= {OPEN_S} s", holds=open_s <= OPEN_S),
    ]  # fmt: skip
    write_section("expert-plan-scale", TITLE, bars, NOTES)


if __name__ == "__main__":
    main()
