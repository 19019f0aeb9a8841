"""From a config to a running job on this rank, and its teardown: logs, data, model, optimizer, saver, loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from torch import nn

from titan_ckpt.location import redact
from titan_ckpt.saving.options import no_steps
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.data.batches import BatchShape, Dataset, open_dataset, unigram_entropy
from titan_ckpt.trainer.data.chat_source import ChatSource
from titan_ckpt.trainer.data.chat_template import template_assets
from titan_ckpt.trainer.data.shard_stream import ASSET, StreamSource, counts_asset, recall_counts
from titan_ckpt.trainer.data.token_source import TokenSource
from titan_ckpt.trainer.data.tokenizer import check_vocabulary, open_tokenizer, tokenizer_folder
from titan_ckpt.trainer.device_mesh import RankMesh
from titan_ckpt.trainer.job.changed_settings import check_settings
from titan_ckpt.trainer.job.control_group import ControlGroup
from titan_ckpt.trainer.job.export import Exporter
from titan_ckpt.trainer.job.frozen_weights import freeze, frozen_record, load_base, num_values
from titan_ckpt.trainer.job.job import Job, Outcome
from titan_ckpt.trainer.job.loop import Loop
from titan_ckpt.trainer.job.own_parts import HookCalls, preparation
from titan_ckpt.trainer.job.rank_process import (
    RankContext,
    RankProcess,
    determinism,
    pick_device,
    process_group,
    start_recorder,
)
from titan_ckpt.trainer.job.resume import (
    Start,
    TrainingProgress,
    describe_start,
    find_start,
    is_new_run,
    kept_assets,
    pipeline_record,
    restore,
)
from titan_ckpt.trainer.job.stop_signals import StopCode, StopRequest
from titan_ckpt.trainer.job.validation import Prepared, Validation, batches_of, validation_sets
from titan_ckpt.trainer.launch.compile_cache import CompileCache
from titan_ckpt.trainer.launch.launch import StoppedError, clear_error, is_launched_here, launched_at_s, write_error
from titan_ckpt.trainer.model.lora import adapters_of, add_adapters, start_adapters
from titan_ckpt.trainer.model.plan import Plan, plan_of, routers_of
from titan_ckpt.trainer.parallel.optimizer import Optimizer, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build_parallel_model
from titan_ckpt.trainer.parallel.precision import describe_precision
from titan_ckpt.trainer.report.goodput import goodput
from titan_ckpt.trainer.report.logs import TRACE, RankLogging, describe_rank, run_folder, upload_logs
from titan_ckpt.trainer.report.loss_check import EXACT, NARROW, LossCheck, recorded_losses
from titan_ckpt.trainer.report.metrics_log import MetricsLog, fetch_history, open_metrics_log, read_history
from titan_ckpt.trainer.report.phases import Phases, trace_events, write_trace
from titan_ckpt.trainer.report.profile import Cycle, Inspection
from titan_ckpt.trainer.report.records import METRICS, Event, parse_records, read_records
from titan_ckpt.trainer.seams.boundary import blamed
from titan_ckpt.trainer.seams.data import checked_source
from titan_ckpt.upkeep.retention import RetentionPolicy

log = logging.getLogger(__name__)


def run_rank(config: TrainConfig, process: RankProcess) -> Outcome:
    """Train on this rank until the end, and close everything that was opened, errors or not."""
    context = RankContext(
        config=config,
        process=process,
        mesh=resolve_mesh(config, process.world_size),
        device=pick_device(config.train.device, process.local_rank),
        folder=run_folder(config.log.folder, config.save.url),
    )
    clear_error(context.folder, process.rank)
    path = context.folder.log(process.rank)
    with RankLogging(path, rank=process.rank, mesh=context.mesh, has_bar=config.log.progress) as logging_:
        try:
            with ExitStack() as stack:
                stop = stack.enter_context(_stop_request(context))
                stack.enter_context(process_group(context))
                first, last = config.log.trace_steps
                phases = Phases(steps=range(first, last + 1) if last else range(0))
                recorder = start_recorder(context, stop)
                if recorder is not None:
                    phases.hook = stack.enter_context(recorder).phase
                return _train(context, stop, phases, logging_)
        except BaseException as error:
            log.info("training ends with an error", exc_info=True)
            found = blamed(error, "this run's own code")
            if found is error:
                raise
            raise found from error


def _train(context: RankContext, stop: StopRequest, phases: Phases, logging_: RankLogging) -> Outcome:
    config, mesh, folder, launched_s = context.config, context.mesh, context.folder, launched_at_s()
    with ExitStack() as stack:
        control = ControlGroup(timeout_s=max(config.train.init_timeout_s, config.save.timeout_s))
        data = open_data(config, control, is_writer=context.process.local_rank == 0)
        metrics = _open_metrics(context, logging_)
        stack.callback(metrics.close)
        names = [os.path.basename(folder.log(context.rank))] + ([METRICS, TRACE] if context.rank == 0 else [])
        stack.callback(lambda: upload_logs(folder, config.save.tiers, names))
        start = find_start(config.resume, config.save.tiers, control, config.model)
        changed = _check_start(config, start, data.dataset)
        stack.enter_context(determinism(config.train.deterministic))
        compiled = _open_compiled(context, start, control) if config.save.compile_cache else None
        parallelized = build_model(context)
        base = load_base(config.resume.from_, start, parallelized, control) if config.lora.rank else None
        freeze(parallelized, config.train.freeze, control)
        hooks = HookCalls(config.extension.hooks)
        optimizer, progress = _begin(config, parallelized, start, data.dataset.fingerprint, control, hooks)
        losses = _loss_check(context, start, progress.step, is_same_run=start.is_own and not changed)
        exporter = saver = None
        if config.export.every and context.rank == 0:
            exporter = stack.enter_context(_exporter(config, metrics, progress.step if start.is_own else None))
        if config.save.url:
            options = _save_options(config, mesh, phases, exporter)
            saver = stack.enter_context(Saver(config.save.url, options))
        prepare = preparation(config, start, parallelized, control)
        job = Job(
            config=config, config_record=as_dict(config),
            assets=_assets(context, start, data, compiled),
            parallelized=parallelized, loss=config.loss, optimizer=optimizer,
            frozen=frozen_record(base, prepare.read), prepare=prepare.run, hooks=hooks,
            loss_check=control.broadcast(losses),
            validation=open_validation(config, parallelized, control, data, prepare.run),
            dataset=data.dataset, saver=saver, exporter=exporter,
            control=control, stop=stop, phases=phases, inspection=_inspection(context), metrics=metrics,
            upload_logs=lambda: upload_logs(folder, config.save.tiers, names),
        )  # fmt: skip
        _announce(job, context.rank, start, progress)
        metrics.event(
            Event.START, step=progress.step, launched_s=launched_s, mesh=str(mesh), world_size=mesh.world_size,
            is_new=int(is_new_run(config.resume, config.save.url, start)),
        )  # fmt: skip
        outcome = Loop(job, progress).run()
        if exporter is not None:
            with phases("export", outcome.step):
                exporter.finish(outcome.committed_step, is_stopped=lambda: stop.code != StopCode.NONE)
        if phases.steps:
            _write_trace(context, phases, control)
        if context.rank == 0:
            log.info("%s", goodput(read_records(folder.file(METRICS))).text())
        return outcome


def _check_start(config: TrainConfig, start: Start, dataset: Dataset) -> list[str]:
    """Compare settings and data with those of the checkpoint; returns the changed settings that change the result."""
    changed: list[str] = []
    if start.checkpoint is not None and not start.model_only:
        changed = check_settings(start.checkpoint, as_dict(config), is_own=start.is_own)
    if start.checkpoint is not None and ASSET in start.checkpoint.manifest.assets:
        recall_counts(dataset.sources, start.checkpoint.asset(ASSET), str(start.checkpoint))
    return changed


def _begin(
    config: TrainConfig,
    parallelized: Parallelized,
    start: Start,
    fingerprint: str,
    control: ControlGroup,
    hooks: HookCalls,
) -> tuple[Optimizer, TrainingProgress]:
    """Build the optimizer and load what `start` has; new adapters on another run's model begin at step 0."""
    adapters = adapters_of(parallelized.named_parameters())
    optimizer = build_optimizer(parallelized, config.optimizer, only=adapters or None, spec=config.extension.optimizer)
    progress = restore(
        Start() if adapters and not start.is_own else start, parallelized, optimizer,
        control=control, fingerprint=fingerprint, other_data=config.resume.other_data, hooks=hooks.kept(),
    )  # fmt: skip
    return optimizer, progress


def _loss_check(context: RankContext, start: Start, step: int, *, is_same_run: bool) -> LossCheck:
    """What rank 0 knows of the losses around the checkpoint that is resumed; the other ranks are told."""
    config, count = context.config, context.config.resume.check_losses
    if not count or context.rank != 0 or start.checkpoint is None or not step:
        return LossCheck()
    mesh = config.mesh
    is_exact = (mesh.param_dtype, mesh.experts_dtype, mesh.float8) == ("float32", "param_dtype", "none")
    data = read_history(start.checkpoint.url)
    path = context.folder.file(METRICS)
    if start.is_own and os.path.exists(path):
        with open(path, "rb") as file:
            data = file.read()
    found = recorded_losses(
        parse_records(data.decode("utf-8", "replace")), step=step, count=count, is_same_run=is_same_run,
        tolerance=EXACT if is_exact else NARROW,
    )  # fmt: skip
    log.log(logging.INFO if found.knows_any else logging.WARNING, "resume.check_losses: %s", found.describe())
    return found


def _stop_request(context: RankContext) -> StopRequest:
    """Handle signals and the time limit; a rank that is still running when the grace period is over exits with an error."""
    rank, config = context.rank, context.config

    def end(what: str) -> None:
        error = StoppedError(
            f"rank {rank} was still running: {what} s are over. Committed checkpoints are intact; "
            "raise save.grace_s if saving takes longer"
        )
        log.log(logging.INFO if is_launched_here() else logging.ERROR, "%s", error)
        write_error(context.folder, rank, error)
        os._exit(error.exit_code)

    return StopRequest(max_seconds=config.train.max_seconds, grace_s=config.save.grace_s, on_late=end)


def _exporter(config: TrainConfig, metrics: MetricsLog, begun_from: int | None) -> Exporter:
    exporter = Exporter(
        config.export, config.save.url, lambda outcome: metrics.event(Event.EXPORT, **asdict(outcome)),
        has_adapters=config.lora.rank > 0,
    )  # fmt: skip
    if begun_from is not None:
        exporter.begin_from(begun_from)
    return exporter


def build_model(context: RankContext) -> Parallelized:
    """The model, with its adapters."""
    config = context.config
    lora, seed = config.lora, config.train.seed

    def extend(part: nn.Module, plan: Plan, ranks: RankMesh) -> set[str]:
        return add_adapters(part, plan, lora, ranks)

    parallelized = build_parallel_model(
        config.spec, config.mesh, context.mesh, device=context.device, seed=seed, loss=config.loss,
        metrics=tuple(config.extension.metrics.values()), balance=config.experts,
        extend=extend if lora.rank else None,
    )  # fmt: skip
    if lora.rank:
        start_adapters(parallelized.named_parameters())
    return parallelized


def _inspection(context: RankContext) -> Inspection:
    asked, tiers = context.config.log, context.config.save.tiers
    return Inspection(
        folder=context.folder, rank=context.rank, device=context.device,
        profile_steps=asked.profile_steps, memory_steps=asked.memory_steps, memory_dump=asked.memory_dump,
        cycle=Cycle(every=asked.profile_every, active=asked.profile_active, warmup=asked.profile_warmup),
        upload=lambda name: upload_logs(context.folder, tiers, [name]),
    )  # fmt: skip


def _save_options(config: TrainConfig, mesh: MeshSpec, phases: Phases, exporter: Exporter | None) -> SaveOptions:
    asked = config.save
    keep = RetentionPolicy(keep_last=asked.keep_last, keep_every=asked.keep_every or None) if asked.keep_last else None
    return SaveOptions(
        mesh=mesh, pipeline=pipeline_record(plan_of(config.spec), config.mesh, mesh), codec=asked.codec,
        incremental=asked.incremental, mirror=asked.mirror or None, retention=keep, timeout_s=asked.timeout_s, phase=phases,
        in_use=no_steps if exporter is None else exporter.steps, upload_process=asked.upload_process,
        upload_bytes_per_s=asked.upload_bytes_per_s or None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The data of a run, its validation sets, and the tokenizer as JSON if they are text."""

    dataset: Dataset
    sets: Mapping[str, Dataset]
    tokenizer: bytes | None


def open_data(config: TrainConfig, control: ControlGroup, *, is_writer: bool) -> Data:
    """Open the data and the validation sets; collective.

    The writer (local rank 0) tokenises first; the others then map the same files, and fail too if the writer failed.
    """
    if config.extension.data is not None:
        data, validation = config.data, config.validation
        source = checked_source(config.extension.data, config, "data")
        own = Dataset([source], [1.0], seq_len=data.seq_len, seed=config.train.seed, shuffle=data.shuffle,
                      held_out=validation.fraction)  # fmt: skip
        return Data(dataset=own, sets=validation_sets(config, None, is_writer=is_writer), tokenizer=None)
    tokenizer = open_tokenizer(config.data.tokenizer, separator=config.data.separator)
    if config.spec.vocab_size is not None:
        check_vocabulary(tokenizer, config.spec.vocab_size)

    def open_it(is_writer: bool) -> tuple[Dataset, dict[str, Dataset]]:
        data = open_dataset(
            config.data, config.validation, tokenizer, seed=config.train.seed, is_writer=is_writer, chat=config.chat,
            wait_s=max(config.train.init_timeout_s, config.train.step_timeout_s),
        )  # fmt: skip
        return data, validation_sets(config, tokenizer, is_writer=is_writer)

    opened = open_it(True) if is_writer else None
    control.barrier()
    dataset, sets = opened or open_it(False)
    return Data(dataset=dataset, sets=sets, tokenizer=tokenizer.to_json())


def _open_compiled(context: RankContext, start: Start, control: ControlGroup) -> CompileCache:
    """What the compiler makes in this run, with what the start has of it; collective."""
    cache = CompileCache(context.config.save.url)
    if context.process.local_rank == 0 and start.checkpoint is not None:
        cache.fill(start.checkpoint)
    control.barrier()
    return cache


def _assets(
    context: RankContext, start: Start, data: Data, compiled: CompileCache | None
) -> Callable[[], dict[str, bytes]]:
    """What this rank saves beside the tensors: rank 0 what never changes and what is compiled, each the counts of its streams."""
    config, is_first = context.config, context.rank == 0
    kept = kept_assets(start, data.tokenizer) | _chat_assets(config) if is_first else {}

    def now() -> dict[str, bytes]:
        return kept | counts_asset(data.dataset.sources) | (compiled.asset() if compiled and is_first else {})

    return now


def _chat_assets(config: TrainConfig) -> dict[str, bytes]:
    """The chat template of a run on conversations."""
    if config.extension.data is not None or all(source.format != "chat" for source in config.data.sources):
        return {}
    return template_assets(tokenizer_folder(config.data.tokenizer), config.chat.template)


def _open_metrics(context: RankContext, logging_: RankLogging) -> MetricsLog:
    config = context.config
    if context.rank != 0:
        return MetricsLog([], total_steps=config.train.steps)
    fetch_history(context.folder, config.save.tiers)
    return open_metrics_log(
        context.folder, tensorboard=config.log.tensorboard, wandb=config.log.wandb, config=as_dict(config),
        total_steps=config.train.steps, bar=logging_.bar,
    )  # fmt: skip


def _write_trace(context: RankContext, phases: Phases, control: ControlGroup) -> None:
    """Collect the phases of all ranks in one file; a run resumed after the traced steps keeps the earlier file."""
    name, path = describe_rank(context.mesh, context.rank), context.folder.file(TRACE)
    gathered = control.gather(trace_events(phases.spans, rank=context.rank, name=name))
    if context.rank == 0 and phases.spans:
        write_trace(path, gathered)
        log.info("trace of steps %d to %d: %s", phases.steps.start, phases.steps.stop - 1, path)


def _announce(job: Job, rank: int, start: Start, progress: TrainingProgress) -> None:
    """Log the first lines of a run: device, start, model, data, batch, checkpoints."""
    config, mesh, shape = job.config, job.parallelized.mesh, job.batch_shape(progress.step + 1)
    num_parameters = num_values(job.parallelized)
    log.info("%s of mesh %s on %s", describe_rank(mesh, rank), mesh, job.parallelized.ranks.device)
    log.info("%s", describe_start(start, progress))
    log.info(
        "model: %.2f M parameters of this rank's stages, %s",
        num_parameters / 1e6,
        describe_precision(config.mesh, job.parallelized.ranks.device, config.lora),
    )
    log.info("data: %s", _describe_data(job.dataset))
    log.info("batch: %d samples of %d tokens, %s", shape.global_batch_size, config.data.seq_len, shape.describe())
    is_spread = config.experts.balance_loss or config.experts.bias_rate
    if not is_spread and any(routers_of(plan_of(config.spec).module)):
        log.warning(
            "nothing spreads tokens over the experts, and routers tend to use few of them: set experts.balance_loss, or "
            "experts.bias_rate with model.experts.correction_bias"
        )
    tiers = ", then ".join(map(redact, config.save.tiers))
    log.info("checkpoints: %s", tiers or "none (save.url is empty)")


def open_validation(
    config: TrainConfig, model: Parallelized, control: ControlGroup, data: Data, prepare: Prepared
) -> Validation:
    """What validates on this rank."""
    shape = BatchShape(
        global_batch_size=config.train.global_batch_size, microbatch_size=config.train.microbatch_size,
        data_rank=model.data_rank, data_degree=model.data_degree,
    )  # fmt: skip
    return Validation(
        config=config, model=model, control=control, loss=config.loss, prepare=prepare,
        batches=lambda: batches_of(data.dataset, data.sets, config.validation.samples, shape),
    )  # fmt: skip


def _describe_data(dataset: Dataset) -> str:
    files = [source.file for source in dataset.sources if isinstance(source, TokenSource)]
    if not files:
        said = [source.describe() for source in dataset.sources if isinstance(source, ChatSource | StreamSource)]
        return "; ".join(said) or f"{sum(map(len, dataset.sources)):,} samples"
    return f"{', '.join(f'{len(f):,} tokens' for f in files)}; unigram entropy {unigram_entropy(files[0]):.3f} nats"
