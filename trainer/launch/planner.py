"""`titan-ckpt train CONFIG --plan`: the meshes and methods of a cluster, ranked by predicted speed.

Searched: degrees of all axes, the activation checkpointing, samples per forward, 1F1B and interleaved 1F1B. Precision, compiling,
Float8, the loss and the global batch stay as the config has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from typing import Any, Literal, TypeAlias

from titan_ckpt.console.output import format_table
from titan_ckpt.console.units import format_duration, format_size
from titan_ckpt.errors import ConfigError
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.launch.estimate import TrainingEstimate, check_known, estimate_training
from titan_ckpt.trainer.launch.gpus import GIB, Gpu
from titan_ckpt.trainer.launch.throughput import StepTime, Throughput, predict
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.parallel.config import ParallelConfig, mesh_spec

SHOWN = 10
SAMPLES = (1, 2, 4, 8)  # per forward
# Tokens of a rank under cp. Parts shorter than the first make cp's messages small: searched only if longer ones give nothing.
CP_TOKENS = (4096, 1024)
ActivationCheckpoint: TypeAlias = Literal["none", "selective", "full"]
METHODS: tuple[ActivationCheckpoint, ...] = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One setting of the cluster; all sizes and rates are per GPU."""

    config: TrainConfig
    settings: list[str]  # for `--set`: what differs from the config that was given
    mesh: MeshSpec
    speed: Throughput
    estimate: TrainingEstimate

    @property
    def samples(self) -> int:
        """Samples of a forward."""
        parallel = self.config.mesh
        return self.config.train.microbatch_size // (parallel.microbatches if parallel.pp > 1 else 1)

    def bounds(self, count: int = 2) -> list[tuple[str, float]]:
        """The causes that take most of a step, with their shares."""
        step = self.speed.step
        shares = [(f.name, getattr(step, f.name) / step.total) for f in fields(StepTime)]
        return sorted(shares, key=lambda item: -item[1])[:count]

    def facts(self, upload_rate: float) -> dict[str, Any]:
        """The record of `--json`; bytes and seconds."""
        per_rank = self.estimate.checkpoint_bytes_per_rank
        return {
            "mesh": str(self.mesh),
            "set": self.settings,
            "memory_bytes": self.estimate.memory.total,
            "tokens_per_s": self.speed.tokens_per_s,
            "mfu": self.speed.mfu,
            "step_s": self.speed.step.total,
            "step": asdict(self.speed.step),
            "bubble": self.speed.step.bubble / self.speed.step.total,
            "bounds": [name for name, _ in self.bounds()],
            "checkpoint_bytes_per_rank": per_rank,
            "checkpoint_upload_s": per_rank / upload_rate,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What `search` found: the fastest choice of each of the ten fastest meshes, and how many settings there were."""

    best: list[Choice]
    tried: int


def search(config: TrainConfig, num_gpus: int, gpu: Gpu) -> Search:
    """The fastest settings that fit; ConfigError if none does, saying by how much."""
    _check_planned(config)
    smallest: Choice | None = None
    reason = _rules(config, num_gpus, gpu)
    for cp_tokens in CP_TOKENS:
        candidates = list(_candidates(config, num_gpus, gpu, cp_tokens))
        best, smallest, refusal = _fitting(config, candidates, num_gpus, gpu)
        if best:
            return Search(best=best, tried=len(candidates))
        reason = refusal or reason
    raise _nothing_fits(smallest, num_gpus, gpu, reason)


def _fitting(
    config: TrainConfig, candidates: Sequence[TrainConfig], num_gpus: int, gpu: Gpu
) -> tuple[list[Choice], Choice | None, str]:
    """The fastest that fit, one for each mesh; the smallest of all; why the last one that `resolve_mesh` refused was."""
    tried = [(_predicted(one, num_gpus, gpu), one) for one in candidates]
    tried.sort(key=lambda item: -item[0].tokens_per_s)
    best: dict[MeshSpec, Choice] = {}
    smallest: Choice | None = None
    refusal = ""
    for speed, one in tried:
        mesh = mesh_spec(one.mesh, num_gpus)
        if mesh in best:
            continue
        estimate, settings = estimate_training(one, mesh), _settings(config, one)
        choice = Choice(config=one, settings=settings, mesh=mesh, speed=speed, estimate=estimate)
        is_smaller = smallest is None or choice.estimate.memory.total < smallest.estimate.memory.total
        if choice.estimate.memory.total > gpu.usable_bytes and not is_smaller:
            continue
        try:
            resolve_mesh(one, num_gpus)
        except ConfigError as error:
            refusal = str(error)
            continue
        smallest = choice if is_smaller else smallest
        if choice.estimate.memory.total <= gpu.usable_bytes:
            best[mesh] = choice
            if len(best) == SHOWN:
                break
    return list(best.values()), smallest, refusal


def _rules(config: TrainConfig, num_gpus: int, gpu: Gpu) -> str:
    """What the degrees of a plan obey, and how to change it."""
    batch, seq_len = config.train.global_batch_size, config.data.seq_len
    return (
        f"in a plan dp_replicate x dp_shard divides train.global_batch_size ({batch}), tp is at most a node ({gpu.per_node}) and "
        f"divides n_kv_heads, ffn_dim and vocab_size, cp is a power of two, 2 cp divides data.seq_len ({seq_len}) and leaves a "
        f"rank at least {CP_TOKENS[-1]} tokens, pp needs as many samples of a data rank and as many layers; no such degrees "
        f"make {num_gpus}. Change the batch, the sequence or --gpus; `--estimate` takes every mesh that `train` does"
    )


def _check_planned(config: TrainConfig) -> None:
    """ConfigError for what `throughput` does not know."""
    check_known(config)
    if config.lora.rank:
        raise ConfigError("--plan predicts the speed of training a whole model, not adapters; leave out lora.rank")
    assert isinstance(config.model, ModelConfig)
    if config.model.experts is not None:
        raise ConfigError("--plan predicts the speed of dense models; of mixtures --estimate knows memory and traffic")
    if config.mesh.cpu_offload:
        raise ConfigError(
            "--plan does not know the link to host memory, which cpu_offload waits for: set mesh.cpu_offload=false"
        )
    if config.mesh.float8 == "mxfp8":
        raise ConfigError(
            "--plan: the GPUs that it knows have no MXFP8; set mesh.float8 to tensorwise, rowwise or none"
        )


CHOSEN = {
    *(f"mesh.{name}" for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "pp_layers_per_stage")),
    "mesh.pp_schedule", "mesh.microbatches", "mesh.activation_checkpoint", "train.microbatch_size",
}  # fmt: skip
"""The settings that a plan chooses, whatever the config says."""


def _settings(given: TrainConfig, chosen: TrainConfig) -> list[str]:
    """`--set` for each value of `[mesh]` and `[train]` that was changed, in TOML."""
    found = []
    for table in ("mesh", "train"):
        old, new = getattr(given, table), getattr(chosen, table)
        for name in (f.name for f in fields(new) if getattr(old, f.name) != getattr(new, f.name)):
            value = getattr(new, name)
            text = value if isinstance(value, str) else json.dumps(value)
            found.append(f"{table}.{name}={text}")
    return found


def _nothing_fits(smallest: Choice | None, num_gpus: int, gpu: Gpu, reason: str) -> ConfigError:
    where = f"{num_gpus} x {gpu.name}"
    if smallest is None:
        return ConfigError(f"--plan: no mesh of {where} takes this model and batch: {reason}")
    needed, usable = smallest.estimate.memory.total, gpu.usable_bytes
    gradients = 4 * smallest.estimate.num_parameters
    fewest = ceil((smallest.estimate.checkpoint_bytes + gradients) / usable)
    return ConfigError(
        f"--plan: nothing fits {where}: the smallest, {smallest.mesh} with activation_checkpoint="
        f"{smallest.config.mesh.activation_checkpoint}, needs {needed / GIB:.1f} GiB per GPU, {(needed - usable) / GIB:.1f} GiB "
        f"more than the {usable / GIB:.1f} GiB that may be used. Weights, gradients and moments alone take {fewest} of these GPUs"
    )


def _predicted(config: TrainConfig, num_gpus: int, gpu: Gpu) -> Throughput:
    return predict(config, mesh_spec(config.mesh, num_gpus), gpu)


def _candidates(config: TrainConfig, num_gpus: int, gpu: Gpu, cp_tokens: int) -> Iterator[TrainConfig]:
    """Every setting whose degrees divide the model and the batch; some may still be refused by `resolve_mesh`."""
    model = config.model
    assert isinstance(model, ModelConfig)  # by `check_known`
    for parallel in _meshes(config, num_gpus, gpu, cp_tokens):
        local, rest = divmod(config.train.global_batch_size, parallel.dp_replicate * parallel.dp_shard)
        if rest or not local:
            continue
        for method in METHODS:
            one = replace(parallel, activation_checkpoint=method)
            for samples in (s for s in SAMPLES if local % s == 0):
                if parallel.pp == 1:
                    yield _with(config, one, samples)
                elif local // samples >= parallel.pp:
                    schedules = _schedules(one, local // samples, model.n_layers)
                    yield from (_with(config, p, local) for p in schedules)


def _schedules(parallel: ParallelConfig, microbatches: int, num_layers: int) -> Iterator[ParallelConfig]:
    yield replace(parallel, pp_schedule="1F1B", microbatches=microbatches)
    if microbatches % parallel.pp == 0 and 2 * parallel.pp <= num_layers:
        yield replace(parallel, pp_schedule="Interleaved1F1B", microbatches=microbatches)


def _with(config: TrainConfig, parallel: ParallelConfig, microbatch_size: int) -> TrainConfig:
    return replace(config, mesh=parallel, train=replace(config.train, microbatch_size=microbatch_size))


def _meshes(config: TrainConfig, num_gpus: int, gpu: Gpu, cp_tokens: int) -> Iterator[ParallelConfig]:
    """Degrees: tp within a node, cp while each part of a sequence has `cp_tokens`, replicas of whole nodes."""
    model = config.model
    assert isinstance(model, ModelConfig)  # by `check_known`
    for pp in (d for d in _divisors(num_gpus) if d <= model.n_layers):
        for tp in (d for d in _divisors(min(num_gpus // pp, gpu.per_node)) if _divides_model(model, d)):
            for cp in _powers_of_two(config.data.seq_len // cp_tokens):
                data, rest = divmod(num_gpus, pp * tp * cp)
                if rest or not data or (cp > 1 and config.data.seq_len % (2 * cp)):
                    continue
                for replicas in _replicas(data, tp * cp, gpu):
                    yield replace(
                        config.mesh, pp=pp, tp=tp, cp=cp, dp_replicate=replicas, dp_shard=data // replicas,
                        ep=1,
                        pp_layers_per_stage=(), async_tp=config.mesh.async_tp and tp > 1,
                    )  # fmt: skip


def _divides_model(model: ModelConfig, tp: int) -> bool:
    return not (model.n_kv_heads % tp or model.ffn_dim % tp or model.vocab_size % tp)


def _replicas(data: int, inner: int, gpu: Gpu) -> list[int]:
    """1, and those that leave a shard on 1, 2, 4 ... nodes."""
    shards = {nodes * gpu.per_node // inner for nodes in _powers_of_two(data)}
    return [1] + sorted({data // shard for shard in shards if shard > 1 and data % shard == 0} - {1})


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _powers_of_two(limit: int) -> list[int]:
    return [1 << n for n in range(max(1, limit).bit_length())]


def format_plan(found: Search, config: TrainConfig, gpu: Gpu, upload_rate: float) -> str:
    """The choices as text."""
    first = found.best[0]
    train, gpus = config.train, first.mesh.world_size
    size = f"{first.estimate.num_parameters / 1e9:.3f} B parameters"
    head = [
        f"{size} on {gpus} x {gpu.name}; a step is {train.global_batch_size} samples of {config.data.seq_len} tokens",
        f"{found.tried} settings; GiB must stay below {gpu.usable_bytes / GIB:.1f}; checkpoints upload at "
        f"{format_size(upload_rate)}/s per rank",
        *_short_parts(found, config),
        "",
    ]
    columns = [
        "mesh",
        "recompute",
        "samples",
        "pipeline",
        "GiB",
        "tok/s/GPU",
        "MFU",
        "bubble",
        "bound by",
        "save/rank",
        "upload",
    ]
    rows = [_cells(choice, upload_rate) for choice in found.best]
    best = " ".join(f"--set {setting}" for setting in first.settings)
    return "\n".join([*head, format_table(columns, rows), "", f"the first: {best}"]) + "\n"


def _short_parts(found: Search, config: TrainConfig) -> list[str]:
    """A line if only short parts of a sequence gave anything."""
    most_cp = max(choice.mesh.degree("cp") for choice in found.best)
    if most_cp == 1 or config.data.seq_len // most_cp >= CP_TOKENS[0]:
        return []
    return [f"no mesh fits that leaves a rank of cp {CP_TOKENS[0]} tokens, so shorter parts were searched too"]


def _cells(choice: Choice, upload_rate: float) -> Sequence[str]:
    parallel, step = choice.config.mesh, choice.speed.step
    per_rank = choice.estimate.checkpoint_bytes_per_rank
    return [
        str(choice.mesh),
        parallel.activation_checkpoint,
        str(choice.samples),
        f"{parallel.pp_schedule} x {parallel.microbatches}" if parallel.pp > 1 else "-",
        f"{choice.estimate.memory.total / GIB:.1f}",
        f"{choice.speed.tokens_per_s:.0f}",
        f"{choice.speed.mfu:.1%}",
        f"{step.bubble / step.total:.1%}",
        ", ".join(f"{name} {share:.0%}" for name, share in choice.bounds()),
        format_size(per_rank),
        format_duration(per_rank / upload_rate),
    ]
