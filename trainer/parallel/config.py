"""What may be asked of the parallelism, and the arithmetic that refuses what cannot work before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.decoder import LayerRange, ModelConfig

Schedule: TypeAlias = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
DType: TypeAlias = Literal["float32", "bfloat16"]

# Backward comes in two passes, of inputs and of weights.
SPLIT_BACKWARD: tuple[Schedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SINGLE_STAGE: tuple[Schedule, ...] = ("GPipe", "1F1B")  # one stage per rank; all others take two or more
MX_BLOCK = 32  # elements that share a scale in MXFP8
V_SHAPED: tuple[Schedule, ...] = ("ZBVZeroBubble", "DualPipeV")  # rank r has stages r and 2 pp - 1 - r


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees and methods. `dp_shard=-1` takes the ranks that the other axes leave."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1

    pp_schedule: Schedule = "1F1B"
    pp_layers_per_stage: tuple[int, ...] = ()  # empty: cut evenly
    microbatches: int = 0  # per pipeline run; 0: one per stage
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    cp_method: Literal["ring", "all_gather"] = "ring"
    attention: Literal["sdpa", "flex"] = "sdpa"

    reshard_after_forward: Literal["auto", "always", "never"] = "auto"  # auto: always, but never under pp
    cpu_offload: bool = False
    activation_checkpoint: Literal["none", "full", "every_n", "selective", "budget"] = "none"
    checkpoint_every_n: int = 2
    activation_memory_budget: float = 0.5
    loss_chunk_tokens: int = 0  # tokens whose logits stand at once; 0: all of a microbatch

    compile: bool = False
    param_dtype: DType = "float32"  # of the forward and backward; the optimizer's weights stay float32
    reduce_dtype: DType = "float32"
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = "none"
    float8_all_gather: bool = False  # FSDP gathers weights already cast; tensorwise only


def mesh_spec(parallel: ParallelConfig, world_size: int) -> MeshSpec:
    """The mesh these degrees make of `world_size` ranks.

    >>> str(mesh_spec(ParallelConfig(pp=2, tp=2), 16))
    'pp=2,dp_shard=4,tp=2'
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    if degrees["dp_shard"] == -1:
        others = prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        if others < 1 or world_size % others:
            raise ConfigError(
                f"dp_shard=-1: {_product(degrees, skip='dp_shard')} does not divide the world of {world_size} ranks"
            )
        degrees["dp_shard"] = world_size // others
    mesh = MeshSpec.of(degrees)
    if mesh.world_size != world_size:
        raise ConfigError(
            f"{_product(degrees)}, but there are {world_size} ranks; set dp_shard=-1 to take what is left"
        )
    return mesh


def check_fits(
    model: ModelConfig, parallel: ParallelConfig, mesh: MeshSpec, *, seq_len: int, microbatch_size: int
) -> None:
    """Refuse a model, mesh and batch that do not divide; `microbatch_size` is the samples one rank gets per forward."""
    _check_heads(model, mesh)
    _check_tensor(model, parallel, mesh)
    _check_sequence(model, parallel, mesh, seq_len)
    _check_pipeline(model, parallel, mesh, microbatch_size)
    _check_methods(parallel, mesh)
    if parallel.float8 != "none":
        samples = microbatch_size // num_microbatches(parallel, mesh)
        _check_float8(model, mesh, alignment=MX_BLOCK if parallel.float8 == "mxfp8" else 16, tokens=samples * seq_len)


def stage_layers(model: ModelConfig, parallel: ParallelConfig, mesh: MeshSpec) -> list[LayerRange]:
    """The layers of each pipeline stage, in order; evenly cut, the earlier stages take the remainder."""
    counts = parallel.pp_layers_per_stage or _even(model.n_layers, num_stages(parallel, mesh))
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [LayerRange(start, start + count) for start, count in zip(starts, counts, strict=True)]


def num_stages(parallel: ParallelConfig, mesh: MeshSpec) -> int:
    """Stages in all: as many as `pp_layers_per_stage` lists, else one or two per rank as the schedule takes them."""
    pp = mesh.degree("pp")
    if pp == 1:
        return 1
    return len(parallel.pp_layers_per_stage) or pp * (1 if parallel.pp_schedule in SINGLE_STAGE else 2)


def stages_of_rank(parallel: ParallelConfig, mesh: MeshSpec, pp_rank: int) -> list[int]:
    """The stages that a pipeline rank runs: in a loop over the ranks, or there and back (a V)."""
    pp, total = mesh.degree("pp"), num_stages(parallel, mesh)
    if parallel.pp_schedule in V_SHAPED and pp > 1:
        return [pp_rank, total - 1 - pp_rank]
    return list(range(pp_rank, total, pp))


def num_microbatches(parallel: ParallelConfig, mesh: MeshSpec) -> int:
    """Pieces that a pipeline run cuts its batch into."""
    return 1 if mesh.degree("pp") == 1 else parallel.microbatches or num_stages(parallel, mesh)


def _check_heads(model: ModelConfig, mesh: MeshSpec) -> None:
    if model.n_heads % model.n_kv_heads:
        raise ConfigError(
            f"model: {model.n_heads} query heads are not a multiple of {model.n_kv_heads} key/value heads"
        )
    if not model.head_dim and model.dim % model.n_heads:
        raise ConfigError(f"model: dim {model.dim} / {model.n_heads} heads is not whole; give head_dim")
    _divides(model.n_kv_heads, mesh.degree("tp"), "key/value heads", "tp")
    _divides(model.ffn_dim, mesh.degree("tp"), "ffn_dim", "tp")
    _divides(model.vocab_size, mesh.degree("tp"), "vocab_size", "tp")


def _check_tensor(model: ModelConfig, parallel: ParallelConfig, mesh: MeshSpec) -> None:
    if parallel.async_tp and not (parallel.compile and parallel.sequence_parallel and mesh.degree("tp") > 1):
        raise ConfigError(
            "async_tp overlaps the collectives of tp > 1 with sequence_parallel in compiled blocks: set all three"
        )
    if model.tied_embeddings and mesh.degree("pp") > 1 and parallel.pp_schedule in V_SHAPED:
        raise ConfigError(
            f"tied_embeddings with {parallel.pp_schedule}: a rank would have first and last stage and one weight twice; "
            "use 1F1B, Interleaved1F1B or InterleavedZeroBubble, or untie them"
        )


def _check_sequence(model: ModelConfig, parallel: ParallelConfig, mesh: MeshSpec, seq_len: int) -> None:
    cp, tp = mesh.degree("cp"), mesh.degree("tp")
    if seq_len > model.max_seq_len:
        raise ConfigError(f"seq_len {seq_len} is longer than the model's max_seq_len {model.max_seq_len}")
    if cp > 1:
        _divides(seq_len, 2 * cp, "seq_len", "2 x cp (a head and a tail chunk per rank)")
    if tp > 1 and parallel.sequence_parallel:
        _divides(seq_len, cp * tp, "seq_len", "cp x tp (sequence parallel)")


def _check_pipeline(model: ModelConfig, parallel: ParallelConfig, mesh: MeshSpec, microbatch_size: int) -> None:
    pp, stages, schedule = mesh.degree("pp"), num_stages(parallel, mesh), parallel.pp_schedule
    if pp == 1:
        return
    if stages % pp:
        raise ConfigError(f"{stages} stages over pp={pp} ranks: not the same number on each")
    per_rank = stages // pp
    if (schedule in SINGLE_STAGE) != (per_rank == 1) or (schedule in V_SHAPED and per_rank != 2):
        needs = (
            "one stage" if schedule in SINGLE_STAGE else "two stages" if schedule in V_SHAPED else "two or more stages"
        )
        raise ConfigError(f"{schedule} takes {needs} per rank, but {stages} stages / pp={pp} = {per_rank}")
    _check_layers(model, parallel, stages)
    count = num_microbatches(parallel, mesh)
    _divides(microbatch_size, count, "samples per forward", "microbatches")
    minimum = {"GPipe": 1, "DualPipeV": 2 * pp}.get(schedule, pp)
    if count < minimum:
        raise ConfigError(f"{schedule} over pp={pp} needs at least {minimum} microbatches; got {count}")
    if schedule == "Interleaved1F1B":
        _divides(count, pp, "microbatches", "pp")


def _check_layers(model: ModelConfig, parallel: ParallelConfig, stages: int) -> None:
    counts = parallel.pp_layers_per_stage or _even(model.n_layers, stages)
    if sum(counts) != model.n_layers:
        raise ConfigError(
            f"pp_layers_per_stage {list(counts)} adds up to {sum(counts)}, the model has {model.n_layers}"
        )
    if min(counts) < 1:
        raise ConfigError(
            f"{model.n_layers} layers over {stages} stages leaves a stage without a layer: {list(counts)}"
        )


def _check_methods(parallel: ParallelConfig, mesh: MeshSpec) -> None:
    if parallel.attention == "flex" and mesh.degree("cp") > 1:
        raise ConfigError(
            f"attention=flex with cp={mesh.degree('cp')}: context parallelism brings its own attention; use sdpa"
        )
    if parallel.activation_checkpoint == "budget" and not parallel.compile:
        raise ConfigError("activation_checkpoint=budget is decided by the compiler: set compile=true")
    if (
        parallel.activation_checkpoint == "selective"
        and mesh.degree("pp") > 1
        and parallel.pp_schedule in SPLIT_BACKWARD
    ):
        raise ConfigError(
            f"activation_checkpoint=selective with {parallel.pp_schedule}: it allows one backward pass, and this schedule makes "
            "two (inputs, then weights); use full, every_n, or 1F1B or Interleaved1F1B"
        )
    if parallel.checkpoint_every_n < 1:
        raise ConfigError(f"checkpoint_every_n={parallel.checkpoint_every_n}: must be at least 1")
    if parallel.float8_all_gather and parallel.float8 != "tensorwise":
        raise ConfigError(
            f"float8_all_gather needs float8=tensorwise, not {parallel.float8!r}: other scales do not survive a cut"
        )


def _check_float8(model: ModelConfig, mesh: MeshSpec, *, alignment: int, tokens: int) -> None:
    """All three sides of a float8 product (of weights as a rank has them, and its tokens) must be multiples of `alignment`."""
    tp, cp = mesh.degree("tp"), mesh.degree("cp")
    sides = f"the alignment {alignment}"
    _divides(model.dim, alignment, "float8: dim", sides)
    _divides(model.ffn_dim, alignment * tp, "float8: ffn_dim", f"{sides} x tp {tp} =")
    _divides(
        model.n_kv_heads * model.head_size,
        alignment * tp,
        "float8: key/value heads x head size",
        f"{sides} x tp {tp} =",
    )
    _divides(model.n_heads * model.head_size, alignment * tp, "float8: heads x head size", f"{sides} x tp {tp} =")
    _divides(tokens, alignment * cp, "float8: tokens of a forward", f"{sides} x cp {cp} =")


def _divides(size: int, by: int, what: str, parts: str) -> None:
    if size % by:
        raise ConfigError(f"{what} {size} / {parts} {by} = {size / by:.2f}: must be whole")


def _even(count: int, parts: int) -> tuple[int, ...]:
    each, rest = divmod(count, parts)
    return tuple(each + (part < rest) for part in range(parts))


def _product(degrees: dict[str, int], skip: str = "") -> str:
    factors = {axis: degree for axis, degree in degrees.items() if axis != skip}
    return f"{' x '.join(f'{axis} {degree}' for axis, degree in factors.items())} = {prod(factors.values())}"
