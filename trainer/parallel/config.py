"""The `[mesh]` config, and the arithmetic that refuses impossible combinations before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from torch import nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.sharding.pipeline import PipelineStyle, coordinate_of_stage, stage_layers
from titan_ckpt.trainer.device_mesh import EP_OVER_CP
from titan_ckpt.trainer.model.attention import check_varlen
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.plan import Plan, check_stages, check_tensor_cuts, plan_of
from titan_ckpt.trainer.model.stages import BlockRange
from titan_ckpt.trainer.seams.model import ModelSpec, Shared
from titan_ckpt.trainer.seams.patterns import ancestors_of, matching

PipelineSchedule: TypeAlias = Literal[
    "GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
DType: TypeAlias = Literal["float32", "bfloat16"]

# Schedules that split backward in two passes: gradients of inputs, then of weights.
SPLIT_BACKWARD: tuple[PipelineSchedule, ...] = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SINGLE_STAGE: tuple[PipelineSchedule, ...] = ("GPipe", "1F1B")  # one stage per rank; all others take two or more
MX_BLOCK = 32  # elements that share a scale in MXFP8
V_SHAPED: tuple[PipelineSchedule, ...] = ("ZBVZeroBubble", "DualPipeV")  # rank r has stages r and 2 pp - 1 - r


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of the axes, and methods. `dp_shard=-1` uses all ranks that the other axes leave."""

    pp: int = 1  # pipeline parallel: ranks that divide the layers
    dp_replicate: int = 1  # HSDP: copies of the sharded model
    dp_shard: int = -1  # FSDP2: ranks that divide the weights; -1: all that are left
    cp: int = 1  # context parallel: ranks that divide a sequence
    tp: int = 1  # tensor parallel: ranks that divide each matrix
    ep: int = 1  # expert parallel: ranks of dp_shard, or of cp and dp_shard, that divide the experts of a mixture
    etp: int = 1  # ranks of tp that divide each expert: 1 or tp

    pp_schedule: PipelineSchedule = "1F1B"  # order of forwards and backwards
    pp_layers_per_stage: tuple[int, ...] = ()  # empty: an even split
    microbatches: int = 0  # per pipeline run; 0: one per stage
    sequence_parallel: bool = True  # with tp: norms work on parts of the sequence
    loss_parallel: bool = True  # with tp: logits stay divided over the vocabulary
    async_tp: bool = False  # overlap communication and products of tp; with compile by the compiler, which needs NVLink
    cp_method: Literal["ring", "all_gather"] = "ring"  # how keys and values reach the other ranks of cp
    attention: Literal["sdpa", "flex", "varlen"] = "sdpa"  # scaled_dot_product_attention, FlexAttention or varlen_attn

    reshard_after_forward: Literal["auto", "always", "never"] = "auto"  # auto: always, but never under pp
    cpu_offload: bool = False  # weights and optimizer state in host memory between uses
    activation_checkpoint: Literal["none", "full", "every_n", "selective", "budget"] = (
        "none"  # which activations are recomputed in the backward
    )
    checkpoint_every_n: int = 2  # for every_n: one layer in n is recomputed
    activation_memory_budget: float = 0.5  # for budget, with compile: share of the activations that is kept
    loss_chunk_tokens: int = 0  # tokens per chunk of logits; 0: a whole microbatch

    compile: bool = False  # torch.compile of each layer
    param_dtype: DType = "float32"  # of forward and backward; the optimizer's weights stay float32
    experts_dtype: Literal["param_dtype", "bfloat16", "mxfp8"] = "param_dtype"  # of the experts' products
    reduce_dtype: DType = "float32"  # of the gradients while they are reduced
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"] = (
        "none"  # products in float8 or MXFP8 by torchao
    )
    float8_all_gather: bool = False  # FSDP gathers weights already cast to float8; tensorwise only
    float8_skip: tuple[str, ...] = ()  # projections that keep param_dtype: patterns of names, such as "**.k_proj"


def mesh_spec(parallel: ParallelConfig, world_size: int) -> MeshSpec:
    """The mesh of `world_size` ranks with these degrees. Those ranks of dp_shard that divide the experts are an own axis, `ep`.

    Where ep does not divide dp_shard, the ranks of cp divide the experts too: `expert_axes`.

    >>> str(mesh_spec(ParallelConfig(pp=2, tp=2), 16)), str(mesh_spec(ParallelConfig(ep=4), 8))
    ('pp=2,dp_shard=4,tp=2', 'dp_shard=2,ep=4')
    >>> str(mesh_spec(ParallelConfig(cp=2, ep=8), 8))
    'cp=2,ep=4'
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    if degrees["dp_shard"] == -1:
        others = prod(degree for axis, degree in degrees.items() if axis != "dp_shard")
        if others < 1 or world_size % others:
            raise ConfigError(
                f"dp_shard=-1: {_product(degrees, skip='dp_shard')} does not divide the world of {world_size} ranks"
            )
        degrees["dp_shard"] = world_size // others
    if MeshSpec.of(degrees).world_size != world_size:
        raise ConfigError(
            f"{_product(degrees)}, but there are {world_size} ranks; set dp_shard=-1 to take what is left"
        )
    ep = _of_dp_shard(parallel.ep, degrees["dp_shard"], degrees["cp"])
    return MeshSpec.of(degrees | {"dp_shard": degrees["dp_shard"] // ep, "ep": ep})


def _of_dp_shard(ep: int, dp_shard: int, cp: int) -> int:
    """How many ranks of dp_shard are in a group of `ep`: all of it, or those that are left after all ranks of cp."""
    if ep >= 1 and not dp_shard % ep:
        return ep
    if ep >= 1 and not ep % cp and not dp_shard % (ep // cp):
        return ep // cp
    raise ConfigError(
        f"ep {ep} does not divide dp_shard {dp_shard}"
        + (f", nor is it cp {cp} x what divides dp_shard" if cp > 1 else "")
        + ": the ranks of ep are some of dp_shard's, or all of cp's with some of dp_shard's"
    )


def expert_axes(parallel: ParallelConfig, mesh: MeshSpec) -> str:
    """The axes of the mesh whose ranks divide the experts."""
    return "ep" if mesh.degree("ep") == parallel.ep else EP_OVER_CP


def check_fits(
    spec: ModelSpec, parallel: ParallelConfig, mesh: MeshSpec, *, seq_len: int, microbatch_size: int
) -> None:
    """Raise ConfigError if model and batch do not divide over the mesh; `microbatch_size` is samples per rank and forward."""
    plan = plan_of(spec)
    if mesh.degree("tp") > 1:
        check_tensor_cuts(plan, mesh.degree("tp"))
    _check_tensor(spec, parallel, mesh)
    _check_sequence(spec, parallel, mesh, seq_len)
    _check_pipeline(plan, parallel, mesh, microbatch_size)
    _check_varlen(spec, parallel)
    _check_methods(parallel, mesh)
    _check_experts(plan, parallel)
    _check_divided_experts(plan, parallel, mesh.degree("tp"))
    _check_float8_skip(plan, parallel)
    if parallel.float8 != "none":
        samples = microbatch_size // num_microbatches(parallel, mesh)
        _check_float8(plan, parallel, mesh, tokens=samples * seq_len)


def layer_ranges(num_blocks: int, parallel: ParallelConfig, mesh: MeshSpec) -> list[BlockRange]:
    """The blocks of each pipeline stage, in order; an even split gives the remainder to the earlier stages."""
    split = parallel.pp_layers_per_stage if mesh.degree("pp") > 1 else ()
    stages = stage_layers(num_blocks, num_stages(parallel, mesh), split or None)
    return [BlockRange(layers.start, layers.stop) for layers in stages]


def num_stages(parallel: ParallelConfig, mesh: MeshSpec) -> int:
    """Total number of stages: the length of `pp_layers_per_stage`, else one or two per rank, depending on the schedule."""
    pp = mesh.degree("pp")
    if pp == 1:
        return 1
    return len(parallel.pp_layers_per_stage) or pp * (1 if parallel.pp_schedule in SINGLE_STAGE else 2)


def stages_of_rank(parallel: ParallelConfig, mesh: MeshSpec, pp_rank: int) -> list[int]:
    """The stages that a pipeline rank runs."""
    stages = range(num_stages(parallel, mesh))
    return [stage for stage in stages if pp_rank_of_stage(parallel, mesh, stage) == pp_rank]


def pp_rank_of_stage(parallel: ParallelConfig, mesh: MeshSpec, stage: int) -> int:
    """The pipeline rank that runs a stage."""
    return coordinate_of_stage(stage, mesh.degree("pp"), pipeline_style(parallel, mesh))


def pipeline_style(parallel: ParallelConfig, mesh: MeshSpec) -> PipelineStyle:
    """How the schedule assigns stages to ranks: in a loop, or back and forth (V)."""
    is_v = mesh.degree("pp") > 1 and parallel.pp_schedule in V_SHAPED
    return PipelineStyle.V if is_v else PipelineStyle.LOOP


def num_microbatches(parallel: ParallelConfig, mesh: MeshSpec) -> int:
    """Microbatches per pipeline run; 1 without a pipeline."""
    return 1 if mesh.degree("pp") == 1 else parallel.microbatches or num_stages(parallel, mesh)


def _check_tensor(spec: ModelSpec, parallel: ParallelConfig, mesh: MeshSpec) -> None:
    if parallel.async_tp and not (parallel.sequence_parallel and mesh.degree("tp") > 1):
        raise ConfigError("async_tp overlaps the collectives of tp > 1 with sequence_parallel: set both")
    if parallel.async_tp and not parallel.compile and parallel.float8 != "none":
        raise ConfigError(
            f"async_tp with float8={parallel.float8}: only the compiler overlaps products in float8; set compile=true"
        )
    if parallel.async_tp and not parallel.compile and mesh.degree("pp") > 1 and parallel.pp_schedule in SPLIT_BACKWARD:
        raise ConfigError(
            f"async_tp with {parallel.pp_schedule}: gradients of inputs and weights are computed together around the ring, and "
            "this schedule splits them; use 1F1B or Interleaved1F1B, or compile=true"
        )
    if spec.tied and mesh.degree("pp") > 1 and parallel.pp_schedule in V_SHAPED:
        raise ConfigError(
            f"tied weights ({', '.join(spec.tied)}) with {parallel.pp_schedule}: a rank would have first and last stage and one "
            "weight twice; use 1F1B, Interleaved1F1B or InterleavedZeroBubble"
        )


def _check_sequence(spec: ModelSpec, parallel: ParallelConfig, mesh: MeshSpec, seq_len: int) -> None:
    cp, tp = mesh.degree("cp"), mesh.degree("tp")
    if spec.max_seq_len is not None and seq_len > spec.max_seq_len:
        raise ConfigError(f"seq_len {seq_len} is longer than the model's max_seq_len {spec.max_seq_len}")
    if (cp > 1 or parallel.attention != "sdpa") and not spec.attention:
        raise ConfigError(
            f"{spec.name}: ModelSpec.attention is empty, so its attention cannot be replaced: cp, attention=flex and "
            "attention=varlen need modules with an attribute `attend`, such as SdpaAttend()"
        )
    if cp > 1 and not spec.sequence:
        raise ConfigError(f"{spec.name}: ModelSpec.sequence is empty, so cp={cp} has no field of a batch to cut")
    if cp > 1:
        _divides(seq_len, 2 * cp, "seq_len", "2 x cp (a head and a tail chunk per rank)")
    if tp > 1 and parallel.sequence_parallel:
        _divides(seq_len, cp * tp, "seq_len", "cp x tp (sequence parallel)")


def _check_pipeline(plan: Plan, parallel: ParallelConfig, mesh: MeshSpec, microbatch_size: int) -> None:
    pp, stages, schedule = mesh.degree("pp"), num_stages(parallel, mesh), parallel.pp_schedule
    if pp == 1:
        return
    check_stages(plan)
    if stages % pp:
        raise ConfigError(f"{stages} stages over pp={pp} ranks: not the same number on each")
    per_rank = stages // pp
    if (schedule in SINGLE_STAGE) != (per_rank == 1) or (schedule in V_SHAPED and per_rank != 2):
        needs = (
            "one stage" if schedule in SINGLE_STAGE else "two stages" if schedule in V_SHAPED else "two or more stages"
        )
        raise ConfigError(f"{schedule} takes {needs} per rank, but {stages} stages / pp={pp} = {per_rank}")
    _check_layers(len(plan.blocks), parallel, stages)
    count = num_microbatches(parallel, mesh)
    _divides(microbatch_size, count, "samples per forward", "microbatches")
    minimum = {"GPipe": 1, "DualPipeV": 2 * pp}.get(schedule, pp)
    if count < minimum:
        raise ConfigError(f"{schedule} over pp={pp} needs at least {minimum} microbatches; got {count}")
    if schedule == "Interleaved1F1B":
        _divides(count, pp, "microbatches", "pp")


def _check_layers(num_blocks: int, parallel: ParallelConfig, stages: int) -> None:
    counts = parallel.pp_layers_per_stage or _even(num_blocks, stages)
    if sum(counts) != num_blocks:
        raise ConfigError(f"pp_layers_per_stage {list(counts)} adds up to {sum(counts)}, the model has {num_blocks}")
    if min(counts) < 1:
        raise ConfigError(f"{num_blocks} layers over {stages} stages leaves a stage without a layer: {list(counts)}")


def _check_varlen(spec: ModelSpec, parallel: ParallelConfig) -> None:
    if parallel.attention != "varlen":
        return
    if parallel.param_dtype == "float32":
        raise ConfigError(
            'attention=varlen computes in 16 bits: set mesh.param_dtype = "bfloat16", or use attention=flex'
        )
    if isinstance(spec.config, ModelConfig):
        check_varlen(spec.config.head_size, has_sinks=spec.config.sinks)


def _check_methods(parallel: ParallelConfig, mesh: MeshSpec) -> None:
    if parallel.attention != "sdpa" and mesh.degree("cp") > 1 and parallel.cp_method == "ring":
        raise ConfigError(
            f"attention={parallel.attention} with cp={mesh.degree('cp')}: a ring merges the results of other kernels; set "
            'mesh.cp_method = "all_gather", or mesh.attention = "sdpa"'
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


def _check_experts(plan: Plan, parallel: ParallelConfig) -> None:
    spec, ep = plan.spec, parallel.ep
    if ep > 1 and not plan.experts:
        raise ConfigError(f"{spec.name}: ModelSpec.experts is empty, so ep={ep} has nothing to divide; set mesh.ep = 1")
    if parallel.experts_dtype != "param_dtype" and not plan.experts:
        raise ConfigError(f'mesh.experts_dtype = "{parallel.experts_dtype}", but the model has no experts')
    for fqn in plan.experts if parallel.experts_dtype == "mxfp8" else ():
        for name, weight in plan.module.get_submodule(fqn).named_parameters():
            if weight.ndim == 3 and (odd := [size for size in weight.shape[1:] if size % MX_BLOCK]):
                raise ConfigError(
                    f'mesh.experts_dtype = "mxfp8": {fqn}.{name} has a side of {odd[0]}, not a multiple of {MX_BLOCK}'
                )
    for fqn in plan.experts:
        name, weight = next(plan.module.get_submodule(fqn).named_parameters())
        _divides(len(weight), ep, f"{fqn}.{name}: experts", "ep")
    if plan.experts and parallel.float8 != "none":
        raise ConfigError(
            f'float8={parallel.float8} with experts: set float8=none; mesh.experts_dtype = "mxfp8" is for their products'
        )


def divided_weights(fqn: str, experts: nn.Module) -> Mapping[str, int | None]:
    """The dimension along which tp cuts each weight of experts, their attribute `divided`; ConfigError if it cannot be."""
    divided: object = getattr(experts, "divided", None)
    if not isinstance(divided, Mapping):
        raise ConfigError(
            f"mesh.etp: {fqn} has no attribute `divided`, the dimension along which tp cuts each weight; set mesh.etp = 1"
        )
    shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    for name in (*shapes, *divided):
        dim = divided.get(name, 0)
        if name not in shapes or (dim is not None and dim not in range(1, len(shapes[name]))):
            raise ConfigError(
                f"{fqn}.{name}: the attribute `divided` is {dict(divided)}, the weights are {shapes}; expected for each a "
                "dimension from 1 on, or None for a bias of the outputs"
            )
    return divided


def _check_divided_experts(plan: Plan, parallel: ParallelConfig, tp: int) -> None:
    """Whether `etp` can cut each expert."""
    etp = parallel.etp
    if etp == 1:
        return
    if etp != tp:
        raise ConfigError(
            f"mesh.etp = {etp} with tp = {tp}: must be 1, each expert whole on the ranks of tp, or as many as tp, which cut it"
        )
    if not plan.experts:
        raise ConfigError(
            f"{plan.spec.name}: ModelSpec.experts is empty, so etp={etp} has nothing to divide; set mesh.etp = 1"
        )
    if not parallel.sequence_parallel:
        raise ConfigError(
            f"mesh.etp = {etp} without sequence_parallel: every rank of tp would send the same tokens; set "
            "mesh.sequence_parallel = true, or mesh.etp = 1"
        )
    unit, per = (MX_BLOCK, f"{MX_BLOCK} x ") if parallel.experts_dtype == "mxfp8" else (1, "")
    for fqn in plan.experts:
        rules = [plan.rules[name] for name in (fqn, *ancestors_of(fqn)) if name in plan.rules]
        if not rules or not all(isinstance(rule, Shared) for rule in rules):
            raise ConfigError(
                f"mesh.etp: ModelSpec.tensor has {rules} for {fqn}; experts that tp cuts get the tokens of each of its ranks: "
                "make them Shared, outside of regions, or set mesh.etp = 1"
            )
        for name, dim in divided_weights(fqn, plan.module.get_submodule(fqn)).items():
            if dim is not None:
                size = plan.module.get_parameter(f"{fqn}.{name}").shape[dim]
                _divides(size, unit * etp, f"{fqn}.{name}: dimension {dim} of", f"{per}etp")


def skips_float8(parallel: ParallelConfig, fqn: str) -> bool:
    """Whether a projection keeps `param_dtype`."""
    return any(matching(pattern, [fqn]) for pattern in parallel.float8_skip)


def _check_float8_skip(plan: Plan, parallel: ParallelConfig) -> None:
    """Refuse patterns that match no projection, that leave none, or that change nothing."""
    if parallel.float8_skip and parallel.float8 == "none":
        raise ConfigError('mesh.float8_skip is set, but mesh.float8 = "none": no projection is in float8')
    for pattern in parallel.float8_skip:
        if not matching(pattern, plan.linears):
            raise ConfigError(
                f"mesh.float8_skip: {pattern!r} matches no projection of the blocks; one is called "
                f"{next(iter(plan.linears), '(there is none)')}"
            )
    if parallel.float8_skip and all(skips_float8(parallel, fqn) for fqn in plan.linears):
        raise ConfigError(
            f'mesh.float8_skip = {list(parallel.float8_skip)} skips every projection; set mesh.float8 = "none"'
        )


def _check_float8(plan: Plan, parallel: ParallelConfig, mesh: MeshSpec, *, tokens: int) -> None:
    """Check that all three sides of a rank's float8 products are multiples of the alignment."""
    tp, cp, alignment = mesh.degree("tp"), mesh.degree("cp"), MX_BLOCK if parallel.float8 == "mxfp8" else 16
    sides = f"the alignment {alignment}"
    for fqn, linear in plan.linears.items():
        if skips_float8(parallel, fqn):
            continue
        for dim, (side, size) in enumerate((("outputs", linear.out_features), ("inputs", linear.in_features))):
            is_cut = plan.cut(fqn) == dim
            parts = f"{sides} x tp {tp} =" if is_cut else sides
            _divides(size, alignment * (tp if is_cut else 1), f"float8: {fqn}: {side}", parts)
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
