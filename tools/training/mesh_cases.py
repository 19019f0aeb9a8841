"""The meshes, schedules, precisions and memory settings on 4 ranks that tests and benchmarks train on."""

from __future__ import annotations

from typing import Any

from titan_ckpt.trainer.parallel.config import ParallelConfig


def mesh(**options: Any) -> ParallelConfig:
    return ParallelConfig(**options)


MESHES = {
    "fsdp": mesh(dp_shard=4),
    "fsdp, weights kept": mesh(dp_shard=4, reshard_after_forward="never"),
    "fsdp, offloaded": mesh(dp_shard=4, cpu_offload=True),
    "hsdp": mesh(dp_replicate=2, dp_shard=2),
    "replicas": mesh(dp_replicate=4, dp_shard=1),
    "tp": mesh(tp=4),
    "tp, no sequence parallel": mesh(tp=4, sequence_parallel=False),
    "tp, logits gathered": mesh(tp=4, loss_parallel=False, loss_chunk_tokens=50),
    "fsdp x tp": mesh(tp=2, loss_chunk_tokens=50),
    "ring": mesh(cp=4),
    "all-gather": mesh(cp=4, cp_method="all_gather"),
    "fsdp x ring": mesh(cp=2),
    "ring x tp": mesh(cp=2, tp=2),
    "1f1b": mesh(pp=4),
    "1f1b x fsdp": mesh(pp=2),
    "1f1b x tp": mesh(pp=2, tp=2),
    "1f1b x ring": mesh(pp=2, cp=2),
    "uneven stages": mesh(pp=2, pp_layers_per_stage=(1, 3)),
}


EXPERT_MESHES = {
    "ep4": mesh(ep=4),
    "ep2 x fsdp": mesh(ep=2),
    "replicas x ep": mesh(dp_replicate=2, ep=2),
    "ep x tp": mesh(ep=2, tp=2),
    "ep x zbv": mesh(ep=2, pp=2, pp_schedule="ZBVZeroBubble"),
    "ep x ring": mesh(ep=2, cp=2),
    "ep x etp": mesh(ep=2, tp=2, etp=2),
    "fsdp x etp": mesh(tp=2, etp=2),
    "etp of 4, recomputed": mesh(tp=4, etp=4, activation_checkpoint="full"),
    "etp x interleaved": mesh(tp=2, etp=2, pp=2, pp_schedule="Interleaved1F1B"),
    "ep over the ring": mesh(cp=4, ep=4),
    "ep over cp and fsdp": mesh(cp=2, ep=4, cp_method="all_gather"),
    "ep x recomputed": mesh(ep=2, activation_checkpoint="full"),
    "ep4 x recomputed": mesh(ep=4, activation_checkpoint="full"),  # FSDP of experts on one rank
}


SCHEDULES = {
    "gpipe": mesh(pp=2, pp_schedule="GPipe"),
    "looped bfs": mesh(pp=2, pp_schedule="LoopedBFS"),
    "interleaved": mesh(pp=2, pp_schedule="Interleaved1F1B"),
    "interleaved, no sequence parallel": mesh(pp=2, tp=2, pp_schedule="Interleaved1F1B", sequence_parallel=False),
    "interleaved zero bubble": mesh(pp=2, pp_schedule="InterleavedZeroBubble"),
    "zbv": mesh(pp=2, pp_schedule="ZBVZeroBubble"),
    "dualpipev": mesh(pp=2, pp_schedule="DualPipeV"),
}


MEMORY = {
    "all recomputed": mesh(tp=2, activation_checkpoint="full"),
    "every second block": mesh(pp=2, activation_checkpoint="every_n"),
    "selective": mesh(tp=2, activation_checkpoint="selective"),
    "ring recomputed": mesh(cp=2, activation_checkpoint="full"),
}


# docs/parallelism.md derives these bars from the formats' unit roundoff: 2**-8 for bfloat16, 2**-4 for e4m3.
PRECISIONS = {
    "bfloat16": (mesh(param_dtype="bfloat16"), 2**-8),
    "bfloat16 x tp": (mesh(tp=2, param_dtype="bfloat16"), 2**-8),
    "bfloat16 x pp x ring": (mesh(pp=2, cp=2, param_dtype="bfloat16"), 2**-8),
    "float8 tensorwise": (mesh(tp=2, float8="tensorwise"), 2**-6),
    "float8 tensorwise, gathered as float8": (mesh(dp_shard=4, float8="tensorwise", float8_all_gather=True), 2**-6),
    "float8 rowwise": (mesh(tp=2, float8="rowwise"), 2**-6),
    "float8 rowwise x pp, bfloat16": (mesh(pp=2, float8="rowwise", param_dtype="bfloat16"), 2**-6),
    "float8 rowwise_with_gw_hp": (mesh(float8="rowwise_with_gw_hp", param_dtype="bfloat16"), 2**-6),
    "mxfp8": (mesh(float8="mxfp8"), 2**-6),
}
