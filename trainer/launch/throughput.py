"""Seconds of an optimizer step, predicted: a roofline of the GPU, collectives by latency and bandwidth, the pipeline's bubble.

What is counted for a pipeline rank and microbatch, in `_Stage`:

    products      FLOP at a share of the peak, plus the bytes of their operands at the memory's rate; Float8 casts are bytes
    attention     2 x sequence x heads FLOP per token forward (causal), 2.5 times that backward (FlashAttention-2)
    elementwise   norms, rotary embedding, SiLU, residuals and the loss: bytes at the memory's rate
    tp            the collectives of tp, of which asynchronous tp hides a share
    cp            keys, values and their gradients; a ring hides the former behind attention

Then per step: what FSDP cannot hide behind the computing of a forward and a backward, the bubble, sends, the optimizer.

The constants of `FITTED` are the only ones that are not from a data sheet. `python -m benchmarks.training.published` fits them
on half of torchtitan's published rows and judges them on the other half (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import BatchShape
from titan_ckpt.trainer.launch.estimate import OURS, Implementation, kv_width
from titan_ckpt.trainer.launch.gpus import Gpu
from titan_ckpt.trainer.launch.stage_parameters import WIDTH
from titan_ckpt.trainer.model.decoder import ModelConfig, flops_per_token
from titan_ckpt.trainer.model.plan import plan_of
from titan_ckpt.trainer.parallel.config import (
    SINGLE_STAGE,
    ParallelConfig,
    layer_ranges,
    num_microbatches,
    num_stages,
    skips_float8,
    stages_of_rank,
)

# Seconds of a collective and of each step of its ring, NCCL's own figures for its Simple protocol (src/graph/tuning.cc).
CALL_S, NVLINK_HOP_S, NETWORK_HOP_S = 8.4e-6, 3.4e-6, 9.6e-6
BACKWARD_ATTENTION = 2.5  # FLOP of FlashAttention's backward over its forward: five products for two (arXiv 2205.14135)
OPTIMIZER_BYTES = (
    32  # per parameter: read weight, gradient, two moments, and again for the norm; write weight, two moments
)
# Idle time of a pipeline in units of (pp - 1) x a microbatch's time on one stage of a rank. Zero bubble: arXiv 2401.10241.
BUBBLE = {"InterleavedZeroBubble": 1 / 3, "ZBVZeroBubble": 0.0, "DualPipeV": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What is reached of data sheets. `product` to `attention` are shares of the peak of a GPU that is limited to 500 W."""

    product: float  # bfloat16 products, of the bfloat16 peak
    float8: float  # Float8 products with one scale per tensor, of twice that
    rowwise: float  # with one scale per row
    attention: float  # of the bfloat16 peak
    full_power: float  # speed at 700 W over that at 500 W
    memory: float  # of the memory's rate
    eager: float  # elementwise bytes without the compiler, over those with it
    link: float  # of the rates of NVLink and the network
    async_tp: float  # share of tp's collectives that asynchronous tp hides
    ring: float  # attention under cp costs 1 + ring x (cp - 1) / cp


FITTED = Efficiency(
    product=0.514, float8=0.608, rowwise=0.403, attention=0.257, full_power=0.98, memory=0.844, eager=2.92, link=0.853,
    async_tp=0.648, ring=0.305,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by cause, on the slowest pipeline rank; communication as far as nothing hides it."""

    products: float
    attention: float
    elementwise: float
    tp: float
    cp: float
    fsdp: float
    bubble: float
    sends: float
    optimizer: float

    @property
    def total(self) -> float:
        """The whole step."""
        return float(sum(getattr(self, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Predicted speed. `tokens_per_s` is per GPU; `mfu` is relative to the bfloat16 peak and counts attention as PaLM does."""

    tokens_per_s: float
    mfu: float
    step: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A config on a mesh of these GPUs."""

    config: TrainConfig
    mesh: MeshSpec
    gpu: Gpu
    efficiency: Efficiency
    implementation: Implementation

    @property
    def model(self) -> ModelConfig:
        """The decoder's shape."""
        model = self.config.model
        assert isinstance(model, ModelConfig)  # `estimate_training` refuses others
        return model

    @property
    def parallel(self) -> ParallelConfig:
        """The `[mesh]` table."""
        return self.config.mesh

    @property
    def tokens(self) -> float:
        """Tokens of a rank's microbatch."""
        samples = self.config.train.microbatch_size / num_microbatches(self.parallel, self.mesh)
        return samples * self.config.data.seq_len / self.mesh.degree("cp")

    def flops(self, share: float) -> float:
        """FLOP per second at a share of the peak."""
        return self.gpu.flops * share * (self.efficiency.full_power if self.gpu.has_full_power else 1.0)

    def bytes_s(self, size_bytes: float) -> float:
        """Seconds to read or write bytes of the GPU's memory."""
        return size_bytes / (self.gpu.memory_rate * self.efficiency.memory)

    def gather_s(self, axes: str, size_bytes: float, calls: float = 1) -> float:
        """Seconds of `calls` all-gathers (or reduce-scatters) over an axis, of `size_bytes` together when gathered.

        A ring through all ranks of a group; a node's members share its links to the network.
        """
        size = self.mesh.degree(axes)
        if size == 1:
            return 0.0
        members = min(size, max(1, self.gpu.per_node // _stride(self.mesh, axes)))
        nodes = size / members
        rate = self.gpu.nvlink_rate if nodes == 1 else min(self.gpu.nvlink_rate, members * self.gpu.network_rate)
        latency_s = CALL_S + (nodes - 1) * NETWORK_HOP_S + (size - nodes) * NVLINK_HOP_S
        return calls * latency_s + (size - 1) / size * size_bytes / (rate * self.efficiency.link)

    def send_s(self, axis: str, size_bytes: float) -> float:
        """Seconds to send to the next rank of an axis, each rank to its own."""
        is_near = _stride(self.mesh, axis) * self.mesh.degree(axis) <= self.gpu.per_node
        rate = self.gpu.nvlink_rate if is_near else self.gpu.network_rate
        return (NVLINK_HOP_S if is_near else NETWORK_HOP_S) + size_bytes / (rate * self.efficiency.link)


def _stride(mesh: MeshSpec, axes: str) -> int:
    """The distance of neighbours on an axis, in ranks."""
    order = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    last = axes.split("+")[-1]
    return mesh.degree("+".join(order[order.index(last) + 1 :])) if last != "tp" else 1


def predict(
    config: TrainConfig,
    mesh: MeshSpec,
    gpu: Gpu,
    *,
    efficiency: Efficiency = FITTED,
    implementation: Implementation = OURS,
) -> Throughput:
    """The speed of `config` on `mesh`; its model must be the trainer's own decoder."""
    machine = Machine(config=config, mesh=mesh, gpu=gpu, efficiency=efficiency, implementation=implementation)
    slowest = max((_microbatch(machine, rank) for rank in range(mesh.degree("pp"))), key=lambda part: part.total)
    runs = BatchShape(
        global_batch_size=config.train.global_batch_size, microbatch_size=config.train.microbatch_size,
        data_degree=mesh.degree("dp_replicate+dp_shard"),
    ).accumulation  # fmt: skip
    count = runs * num_microbatches(config.mesh, mesh)
    step = StepTime(
        products=count * slowest.products, attention=count * slowest.attention,
        elementwise=count * slowest.elementwise, tp=count * slowest.tp, cp=count * slowest.cp,
        fsdp=_data_parallel(machine, slowest.total, runs), bubble=runs * _bubble(machine, slowest.total),
        sends=count * _sends(machine),
        optimizer=machine.bytes_s(OPTIMIZER_BYTES * _parameters(machine) / mesh.degree("dp_shard+cp")),
    )  # fmt: skip
    tokens_per_s = config.train.global_batch_size * config.data.seq_len / step.total / mesh.world_size
    mfu = tokens_per_s * flops_per_token(machine.model, config.data.seq_len) / gpu.flops
    return Throughput(tokens_per_s=tokens_per_s, mfu=mfu, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Seconds of one microbatch, forward and backward, on a pipeline rank."""

    products: float
    attention: float
    elementwise: float
    tp: float
    cp: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.elementwise + self.tp + self.cp


def _microbatch(machine: Machine, pp_rank: int) -> _Stage:
    parallel, mesh = machine.parallel, machine.mesh
    stages = stages_of_rank(parallel, mesh, pp_rank)
    ranges = layer_ranges(machine.model.n_layers, parallel, mesh)
    layers = sum(ranges[s].end - ranges[s].start for s in stages)
    has_head = num_stages(parallel, mesh) - 1 in stages
    attention = layers * _attention_s(machine)
    return _Stage(
        products=layers * _products_s(machine) + (_head_s(machine) if has_head else 0.0),
        attention=attention,
        elementwise=layers * _elementwise_s(machine) + (_loss_s(machine) if has_head else 0.0),
        tp=layers * _tensor_s(machine),
        cp=_context_s(machine, layers, attention),
    )


def _recomputed(parallel: ParallelConfig) -> float:
    """The share of a block's forward that is computed again in the backward; `selective` keeps every second product."""
    match parallel.activation_checkpoint:
        case "full":
            return 1.0
        case "every_n":
            return 1.0 / parallel.checkpoint_every_n
        case "selective":
            return 0.5
        case "budget":
            return 1.0 - parallel.activation_memory_budget
        case _:
            return 0.0


def _products_s(machine: Machine) -> float:
    """A block's seven projections: forward, backward of inputs and of weights, and what is recomputed."""
    model, tp = machine.model, machine.mesh.degree("tp")
    heads, kv, ffn = model.n_heads * model.head_size / tp, model.n_kv_heads * model.head_size / tp, model.ffn_dim / tp
    sides = {
        "q_proj": (model.dim, heads), "k_proj": (model.dim, kv), "v_proj": (model.dim, kv), "o_proj": (heads, model.dim),
        "gate_proj": (model.dim, ffn), "up_proj": (model.dim, ffn), "down_proj": (ffn, model.dim),
    }  # fmt: skip
    token_s = sum(_token_s(machine, *size, _share_of_float8(machine, name)) for name, size in sides.items())
    return (3 + _recomputed(machine.parallel)) * machine.tokens * token_s


def _token_s(machine: Machine, inputs: float, outputs: float, share: float) -> float:
    """A token's product with a projection that is in Float8 in a `share` of the layers."""
    flops, of = 2 * inputs * outputs, machine.efficiency
    # bfloat16: operands read, result written. Float8 besides: each operand read for its scale and to be cast, and written.
    plain_s = flops / machine.flops(of.product) + machine.bytes_s(2 * inputs + 2 * outputs)
    rate = machine.flops(2 * (of.float8 if machine.parallel.float8 == "tensorwise" else of.rowwise))
    float8_s = flops / rate + machine.bytes_s(6 * inputs + 2 * outputs)
    return (1 - share) * plain_s + share * float8_s


def _share_of_float8(machine: Machine, name: str) -> float:
    """The share of the layers that have the projection `name` in Float8."""
    parallel = machine.parallel
    if parallel.float8 == "none" or not parallel.float8_skip:
        return float(parallel.float8 != "none")
    known = [fqn for fqn in plan_of(machine.config.spec).linears if fqn.endswith(f".{name}")]
    return sum(not skips_float8(parallel, fqn) for fqn in known) / len(known)


def _head_s(machine: Machine) -> float:
    model = machine.model
    flops = 3 * 2 * model.dim * model.vocab_size / machine.mesh.degree("tp")
    return machine.tokens * flops / machine.flops(machine.efficiency.product)


def _attention_s(machine: Machine) -> float:
    model, mesh, parallel = machine.model, machine.mesh, machine.parallel
    heads = model.n_heads * model.head_size / mesh.degree("tp")
    forward = 2 * machine.config.data.seq_len * heads  # two products over half of the keys
    recomputed = 0.0 if parallel.activation_checkpoint == "selective" else _recomputed(parallel)
    slower = 1 + machine.efficiency.ring * (1 - 1 / mesh.degree("cp"))
    flops = forward * (1 + BACKWARD_ATTENTION + recomputed) * slower
    return machine.tokens * flops / machine.flops(machine.efficiency.attention)


def _elementwise_s(machine: Machine) -> float:
    """Norms and residuals, rotary embedding, SiLU and its product: elements read and written, twice as many backward."""
    model, tp = machine.model, machine.mesh.degree("tp")
    heads = (model.n_heads + model.n_kv_heads) * model.head_size
    stream = 8 * model.dim / (tp if machine.parallel.sequence_parallel else 1)
    elements = stream + (2 * heads + 3 * model.ffn_dim) / tp
    kept = machine.parallel.activation_checkpoint in ("none", "budget")  # those fuse recomputation
    times = (3 if kept else 4) * (1.0 if machine.parallel.compile else machine.efficiency.eager)
    return times * machine.bytes_s(machine.tokens * elements * WIDTH[machine.parallel.param_dtype])


def _loss_s(machine: Machine) -> float:
    """Each byte that a logit has in memory is written and read."""
    logits = machine.tokens * machine.model.vocab_size / machine.mesh.degree("tp")
    return machine.bytes_s(2 * machine.implementation.logit_bytes * logits)


def _tensor_s(machine: Machine) -> float:
    """Two all-gathers and two reduce-scatters of the hidden state forward, as many backward; forward again if recomputed."""
    parallel, width = machine.parallel, WIDTH[machine.parallel.param_dtype]
    hidden = machine.tokens * machine.model.dim
    cast = 1 if parallel.float8 == "tensorwise" else width  # torchao gathers what is already cast
    passes = 2 if parallel.activation_checkpoint == "full" else 1
    size = hidden * (passes * (2 * cast + 2 * width) + 4 * width)
    hidden_share = machine.efficiency.async_tp if parallel.async_tp else 0.0
    return (1 - hidden_share) * machine.gather_s("tp", size, calls=4 * passes + 4)


def _context_s(machine: Machine, layers: int, attention_s: float) -> float:
    """Keys and values forward, recomputed and backward, and their float32 gradients; each from rank to rank cp - 1 times."""
    cp, parallel = machine.mesh.degree("cp"), machine.parallel
    if cp == 1:
        return 0.0
    elements = 2 * kv_width(machine.model, machine.implementation) / machine.mesh.degree("tp") * machine.tokens
    passes = 3 if parallel.activation_checkpoint == "full" else 2
    keys_s = layers * (cp - 1) * machine.send_s("cp", passes * elements * WIDTH[parallel.param_dtype])
    gradients_s = layers * (cp - 1) * machine.send_s("cp", elements * 4)
    return gradients_s + (keys_s if parallel.cp_method == "all_gather" else max(0.0, keys_s - attention_s))


def _parameters(machine: Machine) -> float:
    """Parameters of a pipeline rank, divided by tp."""
    model, pp = machine.model, machine.mesh.degree("pp")
    heads, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    blocks = model.n_layers * model.dim * (2 * heads + 2 * kv + 3 * model.ffn_dim)
    ends = (1 if model.tied_embeddings else 2) * model.vocab_size * model.dim
    return (blocks + ends) / pp / machine.mesh.degree("tp")


def _data_parallel(machine: Machine, microbatch_s: float, runs: int) -> float:
    """What FSDP and HSDP cannot hide: more than a forward or backward lasts, and the first gather and last reduction."""
    parallel, mesh, size = machine.parallel, machine.mesh, _parameters(machine)
    calls = machine.model.n_layers // mesh.degree("pp") + 1
    width = 1 if parallel.float8_all_gather else WIDTH[parallel.param_dtype]
    gather_s = machine.gather_s("dp_shard+cp", size * width, calls)
    reduce_s = machine.gather_s("dp_shard+cp", size * WIDTH[parallel.reduce_dtype], calls)
    shard = size / mesh.degree("dp_shard+cp")
    reduce_s += 2 * machine.gather_s("dp_replicate", shard * WIDTH[parallel.reduce_dtype], calls)
    forward_s = microbatch_s / (3 + _recomputed(parallel))
    backward_s = microbatch_s - forward_s
    is_kept = parallel.reshard_after_forward == "never" or (
        parallel.reshard_after_forward == "auto" and mesh.degree("pp") > 1
    )
    again_s = 0.0 if is_kept else gather_s
    exposed = max(0.0, gather_s - forward_s) + max(0.0, again_s + reduce_s - backward_s)
    return runs * (exposed + (gather_s + reduce_s) / calls)


def _bubble(machine: Machine, microbatch_s: float) -> float:
    pp, schedule = machine.mesh.degree("pp"), machine.parallel.pp_schedule
    if pp == 1:
        return 0.0
    stages = 1 if schedule in SINGLE_STAGE else num_stages(machine.parallel, machine.mesh) // pp
    return BUBBLE.get(schedule, 1.0) * (pp - 1) * microbatch_s / stages


def _sends(machine: Machine) -> float:
    """Hidden states forward and gradients backward, for each stage of a rank."""
    mesh, parallel = machine.mesh, machine.parallel
    if mesh.degree("pp") == 1:
        return 0.0
    cut = mesh.degree("tp") if parallel.sequence_parallel else 1
    size = machine.tokens * machine.model.dim / cut * WIDTH[parallel.param_dtype]
    return 2 * num_stages(parallel, mesh) / mesh.degree("pp") * machine.send_s("pp", size)
