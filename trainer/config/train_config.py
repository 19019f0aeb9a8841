"""What `titan-ckpt train` can be told. Each table of the TOML file is one record; `toml_records` reads them.

| table          | what it holds |
|----------------|---------------|
| `[model]`      | the decoder's shape: `model.ModelConfig` |
| `[mesh]`       | degrees of pp, dp_replicate, dp_shard, cp, tp and the methods: `parallel_config.ParallelConfig` |
| `[data]`       | where text comes from, how it becomes samples: `DataConfig` |
| `[optimizer]`  | AdamW and the learning rate: `optimizer.OptimizerConfig` |
| `[train]`      | steps, batch, seed, limits: `TrainOptions` |
| `[lora]`       | low-rank adapters instead of the whole model: `lora.LoraConfig` |
| `[validation]` | a held-out part and how often it is measured: `ValidationConfig` |
| `[save]`       | where checkpoints go and when: `SaveConfig` |
| `[export]`     | Hugging Face folders of the run, made in the background: `ExportConfig` |
| `[resume]`     | what to start from: `ResumeConfig` |
| `[log]`        | files, console, TensorBoard: `LogConfig` |
| `[debug]`      | the recorder of hangs: `DebugConfig` |

`base = "other.toml"` lays a file over another one; `--set table.key=value` comes last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from titan_ckpt.errors import ConfigError
from titan_ckpt.location import parse_location
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.model.decoder import ModelConfig
from titan_ckpt.trainer.model.lora import LoraConfig, check_lora
from titan_ckpt.trainer.parallel.config import ParallelConfig, check_fits, mesh_spec
from titan_ckpt.trainer.parallel.optimizer import OptimizerConfig

Format: TypeAlias = Literal["auto", "text", "jsonl", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One corpus: a file, folder, glob or fsspec URL, a pre-tokenised folder, `datasets:NAME` or `python-stdlib`."""

    url: str
    weight: float = 1.0  # share of the samples, relative to the other sources
    format: Format = "auto"  # auto: by the file's name; .gz and .zst are unpacked
    text_field: str = "text"  # of a JSONL line


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`source` is short for one entry in `mixture`; give one of the two."""

    source: str = ""
    mixture: tuple[SourceConfig, ...] = ()
    seq_len: int = 256
    tokenizer: str = "bytes"  # or the path or URL of a Hugging Face tokenizer.json
    separator: str = ""  # token between documents; empty: the tokenizer's usual end-of-text token
    shuffle: bool = True
    document_masks: bool = False  # a token sees the tokens of its own document only
    bad_line: Literal["stop", "skip"] = "stop"  # a JSONL line that is no JSON or has no text; skipped ones are counted
    cache: str = "~/.cache/titan-ckpt/tokens"  # text is tokenised once per corpus and tokenizer, and mapped into memory
    prefetch: int = 2  # batches made ahead

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The corpora, however they were given."""
        return self.mixture or (SourceConfig(url=self.source),)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """`global_batch_size` is kept on every mesh: ranks that do not divide it get masked samples to fill up."""

    steps: int = 100
    seed: int = 0
    global_batch_size: int = 8  # samples per optimizer step, over all ranks
    microbatch_size: int = 1  # samples of one rank per forward and backward
    max_seconds: float = 0.0  # save, commit and exit cleanly after this long; 0: no limit
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    gc_every: int = 50  # steps from one garbage collection to the next, the same on all ranks; 0: whenever Python likes
    init_timeout_s: float = 600.0  # for collectives until the first step is done
    step_timeout_s: float = 600.0  # for collectives from then on
    freeze: tuple[str, ...] = ()  # globs over names of weights that stay as they are, such as "model.layers.[0-3].*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """A part of the samples that is never trained on; `every=0` switches it off, `fraction` is held out even then."""

    every: int = 0
    fraction: float = 0.0
    samples: int = 64  # at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConfig:
    """Checkpoints of the run at `url`; empty: none are saved."""

    url: str = ""
    mirror: str = (
        ""  # a second, safer store: every commit of url is copied there in the background, and looked for on resumption
    )
    every: int = 0  # steps; 0: only at the end
    at_end: bool = True
    keep_last: int = 0  # after each commit older ones are deleted; 0: none are
    keep_every: int = 0  # with keep_last: multiples of this step are kept for good
    codec: Literal["raw", "planes-zstd"] = "raw"
    incremental: bool = False  # refer to chunks of earlier checkpoints that have not changed
    timeout_s: float = 1800.0  # of an exchange between ranks; must exceed the longest upload
    grace_s: float = 300.0  # after SIGTERM or SIGINT, for the last checkpoint

    @property
    def tiers(self) -> tuple[str, ...]:
        """The stores that hold the run's checkpoints, the nearest first; none where nothing is saved."""
        return tuple(url for url in (self.url, self.mirror) if url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Hugging Face folders `url`/checkpoint-STEP, made from committed checkpoints by a process beside training."""

    every: int = 0  # steps, of those that are saved; the last checkpoint too; 0: none
    url: str = ""  # a folder, or a prefix such as s3://bucket/models; empty: save.url/hf
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # of the weights; empty: as they are saved


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeConfig:
    """`auto` goes on from the newest good checkpoint of `save.url`; `from` starts a new run from another one's."""

    auto: bool = True
    from_: str = ""  # URL[@STEP], used while save.url has no checkpoint of its own
    model_only: bool = False  # of `from`: weights only; step, data and optimizer begin anew
    other_data: bool = False  # go on although the data are not the ones of the checkpoint; the position is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """`folder` holds logs/ and debug/; empty: save.url where that is local, else runs/NAME."""

    folder: str = ""
    every: int = 1  # steps per metrics line
    progress: bool = True  # a bar below the log, where the console is a terminal
    tensorboard: bool = True  # when it is installed
    wandb: str = ""  # the Weights & Biases project that gets every number too; the run has the name of its folder
    trace_steps: tuple[int, int] = (0, 0)  # first and last step of logs/trace.json, for Perfetto; (0, 0): none
    profile_steps: tuple[int, int] = (0, 0)  # first and last step under torch's profiler; logs/profile_R.json
    memory_steps: tuple[int, int] = (0, 0)  # of which the accelerator's memory is recorded; logs/memory_R.pickle


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The recorder leaves a black box on every rank and dumps it when nothing happens for `stall_s`."""

    recorder: bool = True
    stall_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All of it. Only `[model]` has no default."""

    model: ModelConfig
    mesh: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainOptions = field(default_factory=TrainOptions)
    lora: LoraConfig = field(default_factory=LoraConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)


def check(config: TrainConfig) -> None:
    """Refuse values that make no sense on any number of ranks."""
    _check_data(config.data)
    check_lora(config.lora, base=config.resume.from_, float8=config.mesh.float8)
    for name, value, least in (
        ("data.seq_len", config.data.seq_len, 1),
        ("data.prefetch", config.data.prefetch, 1),
        ("train.steps", config.train.steps, 1),
        ("train.global_batch_size", config.train.global_batch_size, 1),
        ("train.microbatch_size", config.train.microbatch_size, 1),
        ("validation.every", config.validation.every, 0),
        ("save.every", config.save.every, 0),
        ("export.every", config.export.every, 0),
        ("save.keep_last", config.save.keep_last, 0),
        ("save.keep_every", config.save.keep_every, 0),
        ("log.every", config.log.every, 1),
        ("train.gc_every", config.train.gc_every, 0),
        ("optimizer.max_skipped", config.optimizer.max_skipped, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} = {value}: must be at least {least}")
    for name in ("trace_steps", "profile_steps", "memory_steps"):
        first, last = getattr(config.log, name)
        if (first, last) != (0, 0) and not 1 <= first <= last:
            raise ConfigError(f"log.{name} = [{first}, {last}]: give the first and the last step, from 1 on")
    if not 0.0 <= config.validation.fraction < 1.0:
        raise ConfigError(f"validation.fraction = {config.validation.fraction}: must be in [0, 1)")
    if config.validation.every and not config.validation.fraction:
        raise ConfigError(
            "validation.every is set, but validation.fraction = 0 holds nothing out; set it, for example 0.01"
        )
    if config.save.every and not config.save.url:
        raise ConfigError("save.every is set, but save.url is empty; give a folder or a URL such as s3://bucket/run")
    if config.save.keep_every and not config.save.keep_last:
        raise ConfigError(
            "save.keep_every is set, but save.keep_last = 0 keeps every checkpoint anyway; set keep_last too"
        )
    _check_tiers(config.save)
    if config.export.every and (not config.save.every or config.export.every % config.save.every):
        raise ConfigError(
            f"export.every = {config.export.every} is not a multiple of save.every = {config.save.every}: "
            "only checkpoints that are saved can be exported"
        )


def _check_tiers(save: SaveConfig) -> None:
    for name, url in (("url", save.url), ("mirror", save.mirror)):
        if url and parse_location(url).step is not None:
            raise ConfigError(f"save.{name} = {url!r} names a step; a run is saved to a folder without @STEP")
    if save.mirror and save.mirror == save.url:
        raise ConfigError(f"save.mirror = {save.mirror!r} is save.url itself; give another store, or leave it out")
    if save.mirror and not save.url:
        raise ConfigError("save.mirror is set, but save.url is empty; save.url is the fast store that is copied from")


def _check_data(data: DataConfig) -> None:
    if bool(data.source) == bool(data.mixture):
        raise ConfigError('data: give either source = "..." or [[data.mixture]] tables with url and weight')
    for source in data.mixture:
        if not source.weight > 0.0:
            raise ConfigError(f"data.mixture: {source.url}: weight {source.weight} must be more than 0")


def resolve_mesh(config: TrainConfig, world_size: int) -> MeshSpec:
    """The mesh of `world_size` ranks; refuses what does not divide, before anything is allocated."""
    mesh = mesh_spec(config.mesh, world_size)
    check_fits(
        config.model, config.mesh, mesh, seq_len=config.data.seq_len, microbatch_size=config.train.microbatch_size
    )
    return mesh


def fixed_world_size(config: TrainConfig) -> int | None:
    """Ranks that the mesh asks for; None when dp_shard=-1 takes what is there."""
    return None if config.mesh.dp_shard == -1 else MeshSpec.of(_degrees(config.mesh)).world_size


def _degrees(parallel: ParallelConfig) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
