"""What a rank sends in one optimizer step, axis by axis.

One convention for all: the bytes that leave the rank, with ring algorithms; as many arrive. Of n ranks and a gathered tensor of
b bytes, an all-gather, a reduce-scatter and an all-to-all send (n - 1) / n x b, an all-reduce twice that; a message its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import BatchShape
from titan_ckpt.trainer.device_mesh import DATA_AXES, FSDP_AXES
from titan_ckpt.trainer.launch.stage_parameters import WIDTH, Parameters
from titan_ckpt.trainer.parallel.config import num_microbatches, num_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """One kind of collective in a step: calls per rank, and the bytes that the rank sends."""

    name: str
    calls: int
    size_bytes: float


def collectives(config: TrainConfig, mesh: MeshSpec, weights: Parameters) -> list[CollectiveTraffic]:
    """The collectives of a rank that has `weights`, in one optimizer step."""
    runs = BatchShape(
        global_batch_size=config.train.global_batch_size, microbatch_size=config.train.microbatch_size,
        data_degree=mesh.degree(DATA_AXES),
    ).accumulation  # fmt: skip
    tokens = config.train.microbatch_size * config.data.seq_len / mesh.degree("cp")
    return [
        *_data_parallel(config, mesh, weights, runs),
        *_of_activations(config, mesh, tokens, runs),
        *_context(config, mesh, tokens, runs),
    ]


def _of_activations(config: TrainConfig, mesh: MeshSpec, tokens: float, runs: int) -> list[CollectiveTraffic]:
    """Hidden states over tp, to experts, and between pipeline stages."""
    model, parallel = config.model, config.mesh
    tp, pp, micro = mesh.degree("tp"), mesh.degree("pp"), num_microbatches(parallel, mesh)
    hidden, found = tokens * model.dim * WIDTH[parallel.param_dtype], []
    cut = tp if parallel.sequence_parallel else 1
    if tp > 1:
        passes = 3 if parallel.activation_checkpoint == "full" else 2
        calls = runs * micro * (model.n_layers // pp) * 4 * passes
        sent = calls * hidden / micro * (tp - 1) / tp
        found.append(CollectiveTraffic(name="TP all-gather and reduce-scatter", calls=calls, size_bytes=sent))
    if parallel.ep > 1 and model.experts is not None:
        passes = 6 if parallel.activation_checkpoint == "full" else 4
        calls = runs * micro * (model.n_layers - model.dense_layers) // pp * passes
        rows = hidden * model.experts.per_token / cut * (parallel.ep - 1) / parallel.ep
        found.append(CollectiveTraffic(name="EP all-to-all", calls=calls, size_bytes=calls * rows / micro))
    if parallel.etp > 1 and model.experts is not None:
        found.append(
            _to_all(config, calls=runs * micro * (model.n_layers - model.dense_layers) // pp, hidden=hidden / micro)
        )
    if pp > 1:
        each = num_stages(parallel, mesh) // pp * 2
        sent = runs * each * hidden / cut
        found.append(CollectiveTraffic(name="PP send and receive", calls=runs * micro * each, size_bytes=sent))
    return found


def _to_all(config: TrainConfig, *, calls: int, hidden: float) -> CollectiveTraffic:
    """Rows of `calls` mixtures to all ranks of tp, and their results; half of gate or up to the rank with the other half."""
    model, parallel, etp = config.model, config.mesh, config.mesh.etp
    assert model.experts is not None
    passes, rows = (
        3 if parallel.activation_checkpoint == "full" else 2,
        hidden * model.experts.per_token * (etp - 1) / etp,
    )
    pairs = 0 if model.experts.limit is not None else 2 * model.experts.ffn_dim / etp / model.dim
    return CollectiveTraffic(
        name="TP all-to-all of experts",
        calls=calls * passes * (2 if not pairs else 3),
        size_bytes=calls * passes * rows * (2 + pairs),
    )


def _context(config: TrainConfig, mesh: MeshSpec, tokens: float, runs: int) -> list[CollectiveTraffic]:
    """ring: keys and values to all others, in forward and again in backward; their float32 gradients once around.

    all_gather: keys and values in forward, their gradients in backward.
    """
    model, parallel, cp = config.model, config.mesh, mesh.degree("cp")
    if cp == 1:
        return []
    width, passes = WIDTH[parallel.param_dtype], 2 if parallel.activation_checkpoint == "full" else 1
    elements = 2 * tokens * model.n_kv_heads * model.head_size / mesh.degree("tp")
    if parallel.cp_method == "ring":
        calls, sent = (passes + 1) * (cp - 1) + cp, elements * ((passes + 1) * (cp - 1) * width + cp * 4)
    else:
        calls, sent = passes + 1, elements * (passes + 1) * (cp - 1) * width
    times = runs * (model.n_layers // mesh.degree("pp"))
    calls *= times * num_microbatches(parallel, mesh)
    return [CollectiveTraffic(name="CP keys and values", calls=calls, size_bytes=times * sent)]


def _data_parallel(config: TrainConfig, mesh: MeshSpec, weights: Parameters, runs: int) -> list[CollectiveTraffic]:
    """What FSDP and HSDP send in one optimizer step of `runs` accumulated batches."""
    parallel = config.mesh
    width, reduce = WIDTH[parallel.param_dtype], WIDTH[parallel.reduce_dtype]
    pp, replicas = mesh.degree("pp"), mesh.degree("dp_replicate")
    calls = runs * (config.model.n_layers // pp + 1)
    own = weights.sharded(mesh)
    sent = runs * (weights.over_model(parallel) - own)
    trained = weights.trained.sharded(mesh)
    reduced = runs * (weights.trained.over_model(parallel) - trained)
    found = []
    if mesh.degree(FSDP_AXES) > 1:
        times = 2 if pp == 1 and parallel.reshard_after_forward != "never" else 1
        found += [
            CollectiveTraffic(name="FSDP all-gather", calls=times * calls, size_bytes=times * sent * width),
            CollectiveTraffic(name="FSDP reduce-scatter", calls=calls, size_bytes=reduced * reduce),
        ]
    if replicas > 1:
        summed = 2 * (replicas - 1) / replicas * runs * trained * reduce
        found.append(CollectiveTraffic(name="HSDP all-reduce", calls=calls, size_bytes=summed))
    return found
