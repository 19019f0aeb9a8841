"""The range of every number of the config: what no run can use is refused by name, before any memory is taken for it."""

from __future__ import annotations

from math import prod
from operator import attrgetter
from typing import Any

from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MAX_RANKS
from titan_ckpt.trainer.model.decoder import ModelConfig

MAX_STEPS = 10**12
MAX_SECONDS = 10**9
MAX_PARAMETERS = 10**14  # a hundred times the largest models of today
MAX_LAYERS = 10_000
MAX_SIZE = 1 << 24  # a dimension of a weight, samples of a batch
MAX_TOKENS = 1 << 31  # of one forward
MAX_BATCH_TOKENS = 1 << 36
MAX_PREFETCH = 1024
MAX_RATE = 1e38  # of float32: learning rate, weight decay, norm of a gradient

# Name, least, most. The upper limits are far above every run; they stand between a typing error and its allocation.
RANGES: tuple[tuple[str, float, float], ...] = (
    *((f"model.{name}", 1, MAX_SIZE) for name in ("vocab_size", "dim", "n_heads", "n_kv_heads", "ffn_dim")),
    ("model.n_layers", 1, MAX_LAYERS),
    ("model.head_dim", 0, MAX_SIZE),
    ("model.max_seq_len", 1, MAX_TOKENS),
    *((f"mesh.{axis}", 1, MAX_RANKS) for axis in ("pp", "dp_replicate", "cp", "tp", "ep", "etp")),
    ("mesh.dp_shard", -1, MAX_RANKS),
    ("mesh.microbatches", 0, MAX_SIZE),
    ("mesh.loss_chunk_tokens", 0, MAX_TOKENS),
    ("data.seq_len", 1, MAX_TOKENS),
    ("data.prefetch", 1, MAX_PREFETCH),
    ("train.steps", 1, MAX_STEPS),
    ("train.global_batch_size", 1, MAX_SIZE),
    ("train.microbatch_size", 1, MAX_SIZE),
    ("train.gc_every", 0, MAX_STEPS),
    *((f"train.{name}", 0, MAX_SECONDS) for name in ("max_seconds", "init_timeout_s", "step_timeout_s")),
    ("lora.rank", 0, MAX_SIZE),
    *((f"experts.{name}", 0, MAX_RATE) for name in ("bias_rate", "balance_loss", "z_loss")),
    ("validation.every", 0, MAX_STEPS),
    ("validation.samples", 0, MAX_STEPS),
    ("save.every", 0, MAX_STEPS),
    ("save.keep_last", 0, MAX_STEPS),
    ("save.keep_every", 0, MAX_STEPS),
    ("save.upload_bytes_per_s", 0, MAX_RATE),
    *((f"save.{name}", 0, MAX_SECONDS) for name in ("timeout_s", "grace_s")),
    ("export.every", 0, MAX_STEPS),
    ("resume.check_losses", 0, MAX_STEPS),
    ("log.every", 1, MAX_STEPS),
    ("log.profile_every", 0, MAX_STEPS),
    ("log.profile_active", 1, MAX_STEPS),
    ("log.profile_warmup", 0, MAX_STEPS),
    *((f"optimizer.{name}", 0, MAX_RATE) for name in ("lr", "eps", "weight_decay", "grad_clip", "min_lr_ratio")),
    ("optimizer.max_skipped", 1, MAX_STEPS),
    ("optimizer.warmup_steps", 0, MAX_STEPS),
    ("debug.stall_s", 0, MAX_SECONDS),
)


def check_ranges(config: Any) -> None:
    """ConfigError for a number of a `TrainConfig` outside its range, also for NaN, and for products that no machine can hold."""
    is_decoder = isinstance(config.model, ModelConfig)
    for name, least, most in RANGES:
        if name.startswith("model.") and not is_decoder:
            continue
        value = attrgetter(name)(config)
        if not value >= least:
            raise ConfigError(f"{name} = {_shown(value)}: must be at least {least}")
        if not value <= most:
            raise ConfigError(f"{name} = {_shown(value)}: must be at most {most}")
    _check_ramp(config.train)
    seq_len = ("data.seq_len", config.data.seq_len)
    _limit(MAX_TOKENS, "tokens of one forward", ("train.microbatch_size", config.train.microbatch_size), seq_len)
    _limit(MAX_BATCH_TOKENS, "tokens per step", ("train.global_batch_size", config.train.global_batch_size), seq_len)
    count = num_parameters(config.model) if is_decoder else 0
    if count > MAX_PARAMETERS:
        model = config.model
        raise ConfigError(
            f"model: vocab_size {model.vocab_size}, dim {model.dim}, n_layers {model.n_layers}, ffn_dim {model.ffn_dim}: "
            f"{count:.3g} parameters; at most {MAX_PARAMETERS:.0e}"
        )


def _check_ramp(train: Any) -> None:
    """ConfigError unless steps and samples of `train.batch_ramp` rise, the samples below `train.global_batch_size`."""
    before = (0, 0)
    for pair in (*train.batch_ramp, (MAX_STEPS, train.global_batch_size)):
        if pair[0] <= before[0] or pair[1] <= before[1]:
            raise ConfigError(
                f"train.batch_ramp = {[list(each) for each in train.batch_ramp]}: expected pairs [last step, samples] that both "
                f"rise from 1 on, with fewer samples than train.global_batch_size = {train.global_batch_size}"
            )
        before = pair


def num_parameters(model: ModelConfig) -> int:
    """The weights of all matrices of a model."""
    vocabulary = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    dense = model.dense_layers * 3 * model.dim * model.ffn_dim
    mixtures = 0
    if model.experts is not None:
        experts = (model.experts.number + model.experts.shared) * 3 * model.experts.ffn_dim + model.experts.number
        mixtures = (model.n_layers - model.dense_layers) * experts * model.dim
    return vocabulary + model.n_layers * model.attention_weights + dense + mixtures


def _limit(most: int, what: str, *factors: tuple[str, int]) -> None:
    if prod(value for _, value in factors) > most:
        shown = " x ".join(f"{name} {value}" for name, value in factors)
        raise ConfigError(f"{shown} = {prod(value for _, value in factors)} {what}: must be at most {most}")


def _shown(value: float) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return str(value)
