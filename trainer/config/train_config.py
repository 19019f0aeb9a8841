"""The config of `titan-ckpt train`. Each table of the TOML file is one record; `toml_records` reads them.

| table          | content |
|----------------|---------------|
| `[model]`      | the decoder's shape: `model.decoder.ModelConfig`, or the record of an extension's model |
| `[mesh]`       | degrees of pp, dp_replicate, dp_shard, cp, tp, ep and the methods: `parallel.config.ParallelConfig` |
| `[data]`       | where text comes from and how it becomes samples: `DataConfig` |
| `[chat]`       | how conversations become samples: `chat.ChatConfig` |
| `[optimizer]`  | rule of updates and learning rate: `parallel.optimizer.OptimizerConfig` |
| `[train]`      | steps, batch, seed, limits: `TrainOptions` |
| `[lora]`       | low-rank adapters instead of the whole model: `model.lora.LoraConfig` |
| `[experts]`    | how the tokens of a mixture are spread over its experts: `model.experts.BalanceConfig` |
| `[validation]` | held-out samples, and how often to evaluate them: `ValidationConfig` |
| `[save]`       | where and when to save checkpoints: `SaveConfig` |
| `[export]`     | Hugging Face folders, exported in the background: `ExportConfig` |
| `[resume]`     | the checkpoint to start from: `ResumeConfig` |
| `[log]`        | files, console, TensorBoard: `LogConfig` |
| `[debug]`      | the hang recorder: `DebugConfig` |

`base = "other.toml"` is read first and overridden by the file; `--set table.key=value` overrides both.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.location import check_writable, parse_location
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.chat import ChatConfig
from titan_ckpt.trainer.config.extension import Extension, NoSettings, check_parts
from titan_ckpt.trainer.config.in_backward import check_in_backward
from titan_ckpt.trainer.config.log import LogConfig, check_log
from titan_ckpt.trainer.config.ranges import check_ranges
from titan_ckpt.trainer.config.validation import Format, ValidationConfig
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.experts import BalanceConfig
from titan_ckpt.trainer.model.lora import LoraConfig, check_lora, check_targets
from titan_ckpt.trainer.model.plan import plan_of, routers_of
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig, check_groups, check_numbers, learning_rate
from titan_ckpt.trainer.parallel.precision import check_base
from titan_ckpt.trainer.seams.boundary import calling, refuse
from titan_ckpt.trainer.seams.loss import Loss
from titan_ckpt.trainer.seams.model import ModelSpec
from titan_ckpt.trainer.seams.optimizer import share_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One corpus: a file, folder, glob or fsspec URL, a pre-tokenised folder, `datasets:NAME` or `python-stdlib`."""

    url: str  # file, folder, glob or fsspec URL, pre-tokenised folder, datasets:NAME or python-stdlib
    weight: float = 1.0  # share of the samples, relative to the other sources
    format: Format = "auto"  # auto: by file name; .gz and .zst are decompressed; chat: conversations, see [chat]
    text_field: str = "text"  # the key of the text in a JSONL line, the column in Parquet


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`source` is short for a `mixture` of one entry; set one of the two."""

    source: str = ""  # one corpus, as in mixture.url
    format: Format = "auto"  # of `source`, as in mixture.format
    mixture: tuple[SourceConfig, ...] = ()  # several corpora with weights
    seq_len: int = 256  # tokens of a sample
    tokenizer: str = "bytes"  # or the path or URL of a Hugging Face tokenizer.json
    separator: str = ""  # token between documents; empty: the tokenizer's usual end-of-text token
    stream: bool = (
        False  # read shard by shard (a file is one) while training, without tokenising all before the first step
    )
    shuffle: bool = True  # samples in random order, the same on every mesh
    document_masks: bool = False  # attention stays within a document
    bad_line: Literal["stop", "skip"] = "stop"  # if a JSONL line is not JSON or has no text; skipped lines are counted
    cache: str = "~/.cache/titan-ckpt/tokens"  # tokenised text, one folder per corpus and tokenizer, mapped into memory
    prefetch: int = 2  # batches prepared in advance

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The corpora, from `mixture` or `source`."""
        return self.mixture or (SourceConfig(url=self.source, format=self.format),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`global_batch_size` is the same on every mesh; if the data ranks do not divide it, masked samples fill it up."""

    steps: int = 100  # optimizer steps of the whole run
    seed: int = 0  # of the initial weights and the data order
    global_batch_size: int = 8  # samples per optimizer step, over all ranks
    batch_ramp: tuple[tuple[int, int], ...] = ()  # smaller batches at first: pairs of a step and the samples up to it
    microbatch_size: int = 1  # samples per rank, forward and backward
    max_seconds: float = 0.0  # then save, commit and exit with code 0; 0: no limit
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: CUDA if there is one
    deterministic: bool = False  # torch.use_deterministic_algorithms: operations that vary from run to run raise
    gc_every: int = 50  # steps between garbage collections, the same on all ranks; 0: Python decides
    init_timeout_s: float = 600.0  # for collectives until the first step has finished
    step_timeout_s: float = 600.0  # for collectives after that
    freeze: tuple[str, ...] = ()  # globs of weights that are not trained, such as "model.layers.[0-3].*"

    def batch_size(self, step: int) -> int:
        """The samples of a step, which is counted from 1.

        >>> ramp = TrainOptions(global_batch_size=8, batch_ramp=((2, 1), (3, 4)))
        >>> [ramp.batch_size(step) for step in range(1, 6)]
        [1, 1, 4, 8, 8]
        """
        return next((samples for last, samples in self.batch_ramp if step <= last), self.global_batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """Checkpoints of the run, saved at `url`; empty: none are saved."""

    url: str = ""  # a folder or an fsspec URL
    mirror: str = ""  # a second, safer store: commits are copied there in the background; resumption looks there too
    every: int = 0  # steps; 0: only at the end
    at_end: bool = True  # save after the last step
    keep_last: int = 0  # newest checkpoints to keep; each commit deletes older ones; 0: keep all
    keep_every: int = 0  # with keep_last: also keep steps that are multiples of this
    codec: Literal["raw", "planes-zstd"] = "raw"  # planes-zstd compresses
    incremental: bool = False  # reuse unchanged chunks of earlier checkpoints
    compile_cache: bool = False  # keep what mesh.compile made: a resumed run executes it, so only in stores you trust
    upload_bytes_per_s: float = 0.0  # of each rank, spread evenly: for a steadier training; 0: full speed
    upload_process: bool = False  # digest and send by a process of its own, so that Python does not wait for it (Linux)
    timeout_s: float = 1800.0  # for exchanges between ranks; must exceed the longest upload
    grace_s: float = 300.0  # for the last checkpoint after SIGTERM or SIGINT

    @property
    def tiers(self) -> tuple[str, ...]:
        """The stores of the run's checkpoints, nearest first; empty if nothing is saved."""
        return tuple(url for url in (self.url, self.mirror) if url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Hugging Face folders `url`/checkpoint-STEP, exported from committed checkpoints by a separate process."""

    every: int = 0  # steps, a multiple of save.every; the last checkpoint is exported too; 0: none
    url: str = ""  # a folder, or a prefix such as s3://bucket/models; empty: save.url/hf
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # of the weights; empty: as saved


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """`auto` resumes from the newest intact checkpoint of `save.url`; `from` starts a new run from another checkpoint."""

    auto: bool = True  # resume from the newest intact checkpoint of save.url
    from_: str = ""  # URL[@STEP], used while save.url has no checkpoint
    model_only: bool = False  # of `from`: weights only; step, data and optimizer start anew
    other_data: bool = False  # resume although the data differ from the checkpoint's; keeps the position
    check_losses: int = 0  # first steps after a resume whose losses must be those recorded before it; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The recorder keeps a black box on every rank, and dumps it if the rank makes no progress for `stall_s`."""

    recorder: bool = True  # record collectives on every rank for `titan-ckpt debug`
    stall_s: float = 300.0  # seconds without progress until a rank dumps its evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The whole config. Only `[model]` is required."""

    extension: ClassVar[Extension] = Extension()

    model: ModelConfig
    mesh: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainOptions = field(default_factory=TrainOptions)
    lora: LoraConfig = field(default_factory=LoraConfig)
    experts: BalanceConfig = field(default_factory=BalanceConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def spec(self) -> ModelSpec:
        """The model of `[model]`."""
        return self.extension.spec(self.model)

    @property
    def loss(self) -> Loss:
        """The extension's loss, or the model's."""
        own = self.extension.loss
        if own is None:
            return self.spec.loss
        make: Any = own
        with calling("loss", own):
            made: Any = own if hasattr(own, "count") else make(self)
        if not callable(made) or not hasattr(made, "count"):
            refuse("loss", own, f"{made!r:.80} has no method count; titan_ckpt.trainer.Loss shows what a loss has")
        loss: Loss = made
        return loss

    def is_logged(self, step: int) -> bool:
        """Whether the numbers of a finished step are logged."""
        return step % self.log.every == 0 or step == self.train.steps

    def rate(self, step: int) -> float:
        """The learning rate of the update after `step` finished steps."""
        own, total = self.extension.schedule, self.train.steps
        return (
            learning_rate(self.optimizer, step, total)
            if own is None
            else self.optimizer.lr * share_of(own, step, total)
        )


def config_type(extension: Extension) -> type[TrainConfig]:
    """The config with an extension's tables: `[model]` is its model's record, its own tables come last."""
    if extension.is_empty:
        return TrainConfig
    check_parts(extension, tuple(f.name for f in dataclasses.fields(TrainConfig)))
    record = extension.model_record()
    tables: list[tuple[str, type, object]] = [("model", record, field(default_factory=record, kw_only=True))]
    if record is not NoSettings and _has_required(record):
        tables = [("model", record, field(kw_only=True))]
    for name, table in extension.tables.items():
        own = field(kw_only=True) if _has_required(table) else field(default_factory=table, kw_only=True)
        tables.append((name, table, own))
    return dataclasses.make_dataclass(
        "ExtendedConfig", tables, bases=(TrainConfig,), frozen=True, kw_only=True, slots=True,
        namespace={"extension": extension},
    )  # fmt: skip


def _has_required(record: type) -> bool:
    fields = dataclasses.fields(record)
    return any(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields)


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for values that are wrong on any mesh."""
    check_ranges(config)
    _check_data(config)
    if config.lora.rank:
        check_targets(config.lora, plan_of(config.spec))
    check_numbers(config.optimizer)
    if config.optimizer.groups:
        _check_groups(config)
    if config.lora.rank and config.optimizer.name == "muon":
        raise ConfigError('optimizer.name = "muon" with lora.rank: adapters are trained with "adamw"')
    if config.train.freeze and not config.lora.rank:
        _check_freeze(config)
    _check_own_model(config)
    _check_balance(config)
    check_lora(config.lora, base=config.resume.from_)
    check_log(config.log)
    if not 0.0 <= config.validation.fraction < 1.0:
        raise ConfigError(f"validation.fraction = {config.validation.fraction}: must be in [0, 1)")
    _check_sets(config)
    if config.validation.every and not config.validation.fraction and not names_of_sets(config):
        raise ConfigError(
            "validation.every is set, but validation.fraction = 0 holds nothing out; set it, for example 0.01"
        )
    if config.save.every and not config.save.url:
        raise ConfigError("save.every is set, but save.url is empty; give a folder or a URL such as s3://bucket/run")
    if config.save.keep_every and not config.save.keep_last:
        raise ConfigError(
            "save.keep_every is set, but save.keep_last = 0 keeps every checkpoint anyway; set keep_last too"
        )
    if config.save.compile_cache and not (config.save.url and config.mesh.compile):
        raise ConfigError("save.compile_cache keeps what mesh.compile = true makes, at save.url; set both, or neither")
    _check_tiers(config.save)
    for name, url in (
        ("save.url", config.save.url),
        ("save.mirror", config.save.mirror),
        ("export.url", config.export.url),
    ):
        if url:
            _check_destination(name, url)
    if config.export.every and (not config.save.every or config.export.every % config.save.every):
        raise ConfigError(
            f"export.every = {config.export.every} is not a multiple of save.every = {config.save.every}: "
            "only checkpoints that are saved can be exported"
        )


def names_of_sets(config: TrainConfig) -> list[str]:
    """The validation sets, of the config and of a module."""
    return [each.name for each in config.validation.sets] + list(config.extension.validation)


def _check_sets(config: TrainConfig) -> None:
    names = names_of_sets(config)
    if twice := [name for name in names if names.count(name) > 1 or not name]:
        raise ConfigError(f"validation.sets: {twice[0]!r}: each set needs a name of its own")


def _check_tiers(save: SaveConfig) -> None:
    for name, url in (("url", save.url), ("mirror", save.mirror)):
        if url and parse_location(url).step is not None:
            raise ConfigError(f"save.{name} = {url!r} names a step; a run is saved to a folder without @STEP")
    if save.mirror and save.mirror == save.url:
        raise ConfigError(f"save.mirror = {save.mirror!r} is save.url itself; give another store, or leave it out")
    if save.mirror and not save.url:
        raise ConfigError("save.mirror is set, but save.url is empty; save.url is the fast store that is copied from")


def _check_destination(name: str, url: str) -> None:
    try:
        check_writable(url)
    except UsageError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_freeze(config: TrainConfig) -> None:
    names = plan_of(config.spec).parameters
    if all(any(fnmatch.fnmatch(name, pattern) for pattern in config.train.freeze) for name in names):
        raise ConfigError(
            f"train.freeze = {list(config.train.freeze)} freezes every weight, so nothing would be trained"
        )


def _check_groups(config: TrainConfig) -> None:
    if config.lora.rank:
        raise ConfigError("optimizer.groups with lora.rank: adapters have one learning rate; leave out the groups")
    check_groups(config.optimizer, plan_of(config.spec).parameters)


def _check_own_model(config: TrainConfig) -> None:
    if config.export.every and not isinstance(config.model, ModelConfig):
        raise ConfigError(
            f"export.every is set, but {config.spec.name} has no Hugging Face layout; only the trainer's own decoder has"
        )


def _check_balance(config: TrainConfig) -> None:
    """What a mixture's settings need, and what is not done with experts."""
    routers = [router for _, router in routers_of(plan_of(config.spec).module)]
    if config.experts != BalanceConfig() and not routers:
        raise ConfigError(f"[experts] is set, but {config.spec.name} has no router")
    if config.experts.bias_rate and not any(router.config.correction_bias for router in routers):
        raise ConfigError("experts.bias_rate moves the correction bias: set model.experts.correction_bias = true")
    if config.lora.rank and routers:
        raise ConfigError("lora.rank with experts: adapters of mixtures are not done yet; leave out lora.rank")


def _check_stream(config: TrainConfig) -> None:
    whole = [source.url for source in config.data.sources if source.format in ("tokens", "nanogpt", "megatron", "chat")]
    if whole:
        raise ConfigError(
            f"data.stream reads text as shards; {whole[0]} needs none: its format is random access, or packed"
        )
    if config.validation.fraction:
        raise ConfigError(
            "validation.fraction with data.stream: nothing can be held out of what is not read yet; set it to 0"
        )


def _check_data(config: TrainConfig) -> None:
    data, has_own = config.data, config.extension.data is not None
    if has_own and not data.source and not data.mixture:
        return
    if bool(data.source) == bool(data.mixture):
        raise ConfigError('data: give either source = "..." or [[data.mixture]] tables with url and weight')
    if data.stream:
        _check_stream(config)
    if data.mixture and data.format != "auto":
        raise ConfigError("data.format is of data.source; each [[data.mixture]] has a format of its own")
    for source in data.mixture:
        if not source.weight > 0.0:
            raise ConfigError(f"data.mixture: {source.url}: weight {source.weight} must be more than 0")


def resolve_mesh(config: TrainConfig, world_size: int) -> MeshSpec:
    """The mesh of `world_size` ranks; ConfigError if model and batch do not divide over it."""
    mesh = mesh_spec(config.mesh, world_size)
    check_fits(
        config.spec, config.mesh, mesh, seq_len=config.data.seq_len, microbatch_size=config.train.microbatch_size
    )
    check_base(config.lora, config.mesh, mesh)
    check_in_backward(config, mesh)
    return mesh


def fixed_world_size(config: TrainConfig) -> int | None:
    """The number of ranks that the mesh requires; None if dp_shard=-1 adapts to it."""
    return None if config.mesh.dp_shard == -1 else MeshSpec.of(_degrees(config.mesh)).world_size


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
