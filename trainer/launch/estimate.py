"""Estimates for a config on a mesh, without accelerators: memory per rank, collectives per step, checkpoints, save interval.

Parameters are counted on the meta device, stage by stage. Of adapters: gradients, moments and checkpoints are theirs alone, while
activations are counted as of a whole model, which is an upper bound. They follow from what each activation checkpointing mode
keeps (see `trainer.parallel.recompute`). Not counted, so that real peaks are a few percent higher: the allocator's fragmentation,
NCCL's buffers (1 to 2 GiB), the CUDA context. With torchtitan's loss, and its keys and values over cp, the estimates are
within 10 % of its published peaks (docs/performance.md); of ours there are none.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.device_mesh import FSDP_AXES
from titan_ckpt.trainer.launch.stage_parameters import WIDTH, Parameters, stage_parameters, with_adapters
from titan_ckpt.trainer.launch.traffic import CollectiveTraffic, collectives
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.lora import adapter_sizes, targets_of
from titan_ckpt.trainer.model.plan import Plan, plan_of
from titan_ckpt.trainer.parallel.config import (
    SINGLE_STAGE,
    V_SHAPED,
    ParallelConfig,
    layer_ranges,
    num_microbatches,
    num_stages,
    stages_of_rank,
)

MOMENTS = {"float32": 8, "bfloat16": 4, "int8": 2}  # bytes of AdamW's two
DECODING = (
    20  # bytes per value while torchao decodes a weight in NF4: two int64 indices a byte, and the parts of the result
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What differs between trainers with the same config: bytes per logit, and the heads that context parallelism exchanges.

    Ours, with a bfloat16 head: logits, their float32 scores, their gradient (see `titan_ckpt.trainer.model.loss`).
    """

    logit_bytes: float = 8
    repeats_kv: bool = False  # keys and values are repeated to as many heads as queries have, before they are exchanged


OURS = Implementation()


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank's device; the peak of a step is reached in the loss or in the first block's backward."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    block: float
    context: float
    logits: float
    pipeline: float

    @property
    def total(self) -> float:
        """The peak; logits and a block's backward do not exist at the same time."""
        return max(sum(parts.values()) for parts in self.moments().values())

    @property
    def peak_moment(self) -> str:
        """The moment of the peak, a key of `moments`."""
        return max(moments := self.moments(), key=lambda moment: sum(moments[moment].values()))

    def moments(self) -> dict[str, dict[str, float]]:
        """The parts that exist together, by name, in the loss and in a block's backward."""
        held = {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer": self.optimizer,
            "gathered by FSDP": self.gathered, "activations": self.activations, "between pipeline stages": self.pipeline,
        }  # fmt: skip
        return {
            "the loss": held | {"logits and loss": self.logits},
            "a block's backward": held | {"one block's backward": self.block, "keys and values of cp": self.context},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Bytes of the training state that a rank owns."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """The largest rank's needs."""

    mesh: MeshSpec
    num_parameters: int
    num_trained: int
    memory: Memory
    host: State  # in host memory, with `mesh.cpu_offload`
    traffic: list[CollectiveTraffic]
    checkpoint_bytes: float
    checkpoint_bytes_per_rank: float


def estimate_training(
    config: TrainConfig, mesh: MeshSpec, *, implementation: Implementation = OURS
) -> TrainingEstimate:
    """Estimate the pipeline rank that needs most."""
    check_known(config)
    plan = plan_of(config.spec)
    counts = stage_parameters(plan, config.mesh, mesh)
    ranks = _parameters_of_ranks(config, mesh, plan, counts)
    total = sum(counts)
    trained = total if not config.lora.rank else _num_adapters(config, plan)
    state = optimizer_bytes(config, total)
    memories = [_memory(config, mesh, rank, weights, state, implementation) for rank, weights in enumerate(ranks)]
    saved = (4 + state) * trained
    return TrainingEstimate(
        mesh=mesh,
        num_parameters=total,
        num_trained=trained,
        memory=max(memories, key=lambda memory: memory.total),
        host=max((_state(mesh, rank, state) for rank in ranks), key=lambda host: host.total)
        if config.mesh.cpu_offload
        else State(),
        traffic=collectives(config, mesh, max(ranks, key=lambda rank: rank.all)),
        checkpoint_bytes=saved,
        checkpoint_bytes_per_rank=saved / mesh.world_size,
    )


def _parameters_of_ranks(config: TrainConfig, mesh: MeshSpec, plan: Plan, counts: list[int]) -> list[Parameters]:
    """Those of each pipeline rank, from those of each stage."""
    experts = stage_parameters(plan, config.mesh, mesh, among=plan.experts)
    ranges = layer_ranges(len(plan.blocks), config.mesh, mesh)
    found = []
    for rank in range(mesh.degree("pp")):
        mine = stages_of_rank(config.mesh, mesh, rank)
        weights = Parameters(
            all=sum(counts[s] for s in mine), of_experts=sum(experts[s] for s in mine), etp=config.mesh.etp
        )
        blocks = [fqn for s in mine for fqn in plan.blocks[ranges[s].start : ranges[s].end]]
        found.append(with_adapters(weights, config.lora, plan, blocks, mesh.degree("tp")))
    return found


def _num_adapters(config: TrainConfig, plan: Plan) -> int:
    return sum(sum(adapter_sizes(config.lora, linear)) for linear in targets_of(config.lora, plan).values())


def optimizer_bytes(config: TrainConfig, num_parameters: int) -> float:
    """Bytes per parameter of the optimizer's state; of a rule of the user's own, as many as of AdamW with float32 moments.

    Muon keeps one float32 momentum of the matrices in blocks, AdamW's two moments of embedding and head.
    """
    model, optimizer = config.model, config.optimizer
    moments = float(MOMENTS[optimizer.moments])
    if optimizer.name == "muon":
        ends = (1 if model.tied_embeddings else 2) * model.vocab_size * model.dim / num_parameters
        moments = 4 * (1 - ends) + moments * ends
    return moments + (4 if optimizer.ema_decay else 0)


def check_known(config: TrainConfig) -> None:
    """ConfigError for what estimates and plans do not count: models other than the trainer's decoder."""
    if not isinstance(config.model, ModelConfig):
        raise ConfigError(f"--estimate and --plan know the trainer's own decoder, not {config.spec.name}")


def _state(mesh: MeshSpec, weights: Parameters, per_parameter: float) -> State:
    """Float32 weights and gradients, and the optimizer's state, of a rank's shards; and the base in NF4."""
    trained = weights.trained.sharded(mesh)
    held = 4.0 * weights.sharded(mesh) + weights.nf4_bytes
    return State(parameters=held, gradients=4.0 * trained, optimizer=per_parameter * trained)


def _memory(
    config: TrainConfig,
    mesh: MeshSpec,
    pp_rank: int,
    weights: Parameters,
    per_parameter: float,
    implementation: Implementation,
) -> Memory:
    model, parallel = config.model, config.mesh
    tp = mesh.degree("tp")
    held = State() if parallel.cpu_offload else _state(mesh, weights, per_parameter)
    width = WIDTH[parallel.param_dtype]
    tokens = config.train.microbatch_size * config.data.seq_len / mesh.degree("cp") / num_microbatches(parallel, mesh)
    stages = stages_of_rank(parallel, mesh, pp_rank)
    ranges = layer_ranges(model.n_layers, parallel, mesh)
    indices = [index for s in stages for index in range(ranges[s].start, ranges[s].end)]
    dense = sum(index < model.dense_layers for index in indices)
    kept = dense * _kept_per_token(model, parallel, tp) if dense else 0.0
    if dense < len(indices):
        kept += (len(indices) - dense) * _kept_per_token(model, parallel, tp, is_mixture=True)
    has_head = num_stages(parallel, mesh) - 1 in stages
    return Memory(
        parameters=held.parameters,
        gradients=min(held.gradients, _at_once(config, mesh)) if config.optimizer.in_backward else held.gradients,
        optimizer=held.optimizer,
        gathered=_gathered(config, mesh, weights),
        activations=_in_flight(parallel, mesh, pp_rank) * tokens * kept * width,
        block=DECODING * weights.decoded
        + (
            tokens * _block_per_token(model, parallel, tp, is_mixture=dense < len(indices)) * width
            if parallel.activation_checkpoint != "none"
            else 0.0
        ),
        context=tokens * context_per_token(config, mesh, implementation),
        logits=_head(config, tokens, tp, implementation.logit_bytes) if has_head else 0.0,
        pipeline=_boundaries(config, mesh, pp_rank, tokens) if mesh.degree("pp") > 1 else 0.0,
    )


def _at_once(config: TrainConfig, mesh: MeshSpec) -> float:
    """Gradients that exist together where each is used in the backward: of a block, or of embedding and head."""
    model = config.model
    tables = 0 if config.lora.rank else 1 if model.tied_embeddings else 2
    ends = Parameters(all=tables * model.vocab_size * model.dim, of_experts=0)
    return 4.0 * max(_largest_block(config, mesh).trained.sharded(mesh), ends.sharded(mesh))


def _head(config: TrainConfig, tokens: float, tp: int, logit_bytes: float) -> float:
    """One chunk of logits; the head's input, gathered over tp, and its gradient."""
    at_once = min(tokens, config.mesh.loss_chunk_tokens or tokens)
    hidden = 2 * tokens * config.model.dim * WIDTH[config.mesh.param_dtype]
    return at_once * config.model.vocab_size / tp * logit_bytes + hidden


def context_per_token(config: TrainConfig, mesh: MeshSpec, implementation: Implementation) -> float:
    """Bytes per token that context parallelism adds to a block's backward.

    all_gather: all ranks' keys and values, a sorted copy, and the gradient. ring: two sets of keys and values in flight, and
    two of their float32 gradients.
    """
    cp, width = mesh.degree("cp"), WIDTH[config.mesh.param_dtype]
    if cp == 1:
        return 0.0
    keys = 2 * kv_width(config.model, implementation) / mesh.degree("tp")
    return keys * 3 * cp * width if config.mesh.cp_method == "all_gather" else keys * 2 * (width + 4)


def kv_width(model: ModelConfig, implementation: Implementation) -> int:
    """Elements of a token's keys (or values) that context parallelism moves."""
    return model.head_size * (model.n_heads if implementation.repeats_kv else model.n_kv_heads)


def _boundaries(config: TrainConfig, mesh: MeshSpec, pp_rank: int, tokens: float) -> float:
    """Buffers of torch's pipeline stages: receives, one per microbatch and direction, and the outputs they keep."""
    parallel = config.mesh
    stages = len(stages_of_rank(parallel, mesh, pp_rank))
    kept = 2 * num_microbatches(parallel, mesh) + _in_flight(parallel, mesh, pp_rank)
    cut = mesh.degree("tp") if parallel.sequence_parallel else 1
    return stages * kept * tokens * config.model.dim / cut * WIDTH[parallel.param_dtype]


def _gathered(config: TrainConfig, mesh: MeshSpec, weights: Parameters) -> float:
    """Weights gathered by FSDP, and their gradients before reduction.

    FSDP gathers offloaded weights on one rank too; a block's shards and their gradients pass through the device.
    """
    parallel = config.mesh
    if parallel.cpu_offload:
        layer = _largest_block(config, mesh)
        passing = 4 * layer.sharded(mesh) + WIDTH[parallel.reduce_dtype] * layer.trained.sharded(mesh)
        return _unsharded(config, mesh, weights) + passing
    return _unsharded(config, mesh, weights) if mesh.degree(FSDP_AXES) > 1 else 0.0


def _unsharded(config: TrainConfig, mesh: MeshSpec, weights: Parameters) -> float:
    model, parallel, tp = config.model, config.mesh, mesh.degree("tp")
    width, reduce = WIDTH[parallel.param_dtype], WIDTH[parallel.reduce_dtype]
    ends = (1 if model.tied_embeddings else 2) * model.vocab_size * model.dim / tp
    block = _largest_block(config, mesh)
    layer, gradient = block.over_model(parallel), block.trained.over_model(parallel)
    if parallel.reshard_after_forward == "never" and mesh.degree("pp") == 1:
        return weights.over_model(parallel) * width + gradient * (width + reduce)
    if mesh.degree("pp") > 1 and parallel.reshard_after_forward != "always":
        # A pipeline stage keeps both until its last microbatch; then a block's gradient is copied to be reduced.
        kept = weights.over_model(parallel) * width + weights.trained.over_model(parallel) * reduce
        return kept + gradient * reduce
    # Embedding and head stay, and their gradients; two blocks (one ahead); a block's gradient, and its float32 copy to reduce.
    return ends * width * (1 if weights.frozen else 2) + 2 * layer * width + gradient * (width + reduce)


def _largest_block(config: TrainConfig, mesh: MeshSpec) -> Parameters:
    plan, block = plan_of(config.spec), _block_parameters(config.model, config.mesh.etp)
    return with_adapters(block, config.lora, plan, plan.blocks[-1:], mesh.degree("tp"))


def _block_parameters(model: ModelConfig, etp: int) -> Parameters:
    """Of the largest kind of block that the model has."""
    around, experts = model.attention_weights + 2 * model.dim, model.experts
    if experts is None:
        return Parameters(all=around + 3 * model.dim * model.ffn_dim, of_experts=0)
    shared = 3 * model.dim * experts.shared * experts.ffn_dim + model.dim * experts.number
    routed = 3 * model.dim * experts.number * experts.ffn_dim
    return Parameters(all=around + shared + routed, of_experts=routed, etp=etp)


def _in_flight(parallel: ParallelConfig, mesh: MeshSpec, pp_rank: int) -> float:
    """Microbatches whose activations a pipeline rank holds at once, averaged over its stages.

    Several stages in a loop: Megatron-LM's warm-up (arXiv 2104.04473), counted in single stages.
    """
    pp = mesh.degree("pp")
    if pp == 1:
        return 1
    count = num_microbatches(parallel, mesh)
    if parallel.pp_schedule == "GPipe" or parallel.pp_schedule == "LoopedBFS":
        return count
    if parallel.pp_schedule in SINGLE_STAGE:
        return min(count, pp - pp_rank)
    if parallel.pp_schedule in V_SHAPED:
        return min(count, pp + 1)
    stages = num_stages(parallel, mesh) // pp
    return min(count, (pp * (stages - 1) + 2 * (pp - 1 - pp_rank) + 1) / stages)


def _kept_per_token(model: ModelConfig, parallel: ParallelConfig, tp: int, *, is_mixture: bool = False) -> float:
    """Elements per token that a block keeps from forward to backward; sequence parallelism shards block inputs too."""
    heads, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    entry = model.dim / (tp if parallel.sequence_parallel else 1)
    whole = _block_per_token(model, parallel, tp, is_mixture=is_mixture)
    match parallel.activation_checkpoint:
        case "full":
            return entry
        case "every_n":
            share = 1.0 / parallel.checkpoint_every_n
            return share * entry + (1 - share) * whole
        case "selective":  # attention, and of q k v o gate up down every second: q, v, gate, down
            if is_mixture:  # the rows of experts and their results, which two all-to-alls move
                assert model.experts is not None
                moved = 2 * (1 + parallel.etp if parallel.etp > 1 else 1) * model.experts.per_token * model.dim
                return 2 * entry + (2 * heads + kv + moved) / tp
            return 2 * entry + (2 * heads + kv + model.ffn_dim) / tp
        case "budget":
            return entry + parallel.activation_memory_budget * (whole - entry)
        case _:
            return whole


def _block_per_token(model: ModelConfig, parallel: ParallelConfig, tp: int, *, is_mixture: bool = False) -> float:
    """Elements per token that a block's backward needs: the inputs of norms, products and attention, gathered over tp.

    Of a mixture with evenly spread tokens: each row in the order of its token, of its sender and of its expert, there and back;
    half of them are rows at their experts, which with etp are those of all ranks of tp.
    """
    heads, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    between = 4 * model.dim / tp  # residuals and norm inputs
    gathered = 2 * model.dim  # inputs of attention and mlp
    feed_forward = 4 * model.ffn_dim
    if is_mixture and model.experts is not None:
        experts = model.experts
        feed_forward = experts.per_token * (3 * (1 + parallel.etp) * model.dim + 4 * experts.ffn_dim)
        feed_forward += 4 * experts.shared * experts.ffn_dim
    inside = (3 * heads + 4 * kv + feed_forward) / tp  # rotated and plain q, k; v; attention; gate, up, silu, product
    return between + gathered + inside
