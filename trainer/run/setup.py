"""From a config to a job on this rank: device, process group, logs, data, model, optimizer, saver; and back down again."""

from __future__ import annotations

import fnmatch
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.debug.record.recorder import Recorder, environment
from titan_ckpt.errors import ConfigError, NotFoundError, StoreError, TitanError
from titan_ckpt.format.names import DEBUG, LOGS
from titan_ckpt.location import join, redact
from titan_ckpt.saving.options import no_steps
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.config.train_config import TrainConfig, resolve_mesh
from titan_ckpt.trainer.data.batches import BatchShape, Dataset, open_dataset, unigram_entropy
from titan_ckpt.trainer.data.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from titan_ckpt.trainer.device_mesh import BACKENDS, RankMesh
from titan_ckpt.trainer.gloo import one_thread_groups
from titan_ckpt.trainer.launch.launch import StoppedError, is_launched_here, launched_at_s, write_error
from titan_ckpt.trainer.model.decoder import Decoder
from titan_ckpt.trainer.model.lora import adapters_of, add_adapters, start_adapters
from titan_ckpt.trainer.parallel.optimizer import Optimizer, build_optimizer
from titan_ckpt.trainer.parallel.parallel_model import Parallelized
from titan_ckpt.trainer.parallel.parallelize import build
from titan_ckpt.trainer.parallel.precision import describe_precision
from titan_ckpt.trainer.report.goodput import goodput, parse_metrics
from titan_ckpt.trainer.report.logs import (
    METRICS,
    TRACE,
    RankLogging,
    RunFolder,
    describe_rank,
    is_inside,
    run_folder,
    upload_logs,
)
from titan_ckpt.trainer.report.metrics import MetricsLog, Sink, WeightsAndBiases, open_sinks
from titan_ckpt.trainer.report.phases import PhaseHook, Phases
from titan_ckpt.trainer.report.profile import Inspection
from titan_ckpt.trainer.report.trace import trace_events, write_trace
from titan_ckpt.trainer.run.export import Exporter
from titan_ckpt.trainer.run.job import Job, Outcome
from titan_ckpt.trainer.run.loop import Loop
from titan_ckpt.trainer.run.resume import (
    Progress,
    Start,
    changed_settings,
    describe_start,
    find_start,
    kept_assets,
    load_base,
    open_base,
    pipeline_record,
    restore,
)
from titan_ckpt.trainer.run.stop_signals import NOTHING, Agreement, StopRequest
from titan_ckpt.upkeep.retention import RetentionPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """This process among the others."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @staticmethod
    def from_environment() -> RankPlace:
        """What torchrun or our own launcher set; a single rank where nobody did."""
        rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
        world_size = os.environ.get("WORLD_SIZE", "1")
        return RankPlace(rank=int(rank), local_rank=int(local_rank), world_size=int(world_size))


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank; `auto` takes an accelerator where there is one."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError('train.device = "cuda", but torch sees no accelerator here; use "auto" or "cpu"')
    if name == "cpu" or not has_cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def run_rank(config: TrainConfig, place: RankPlace) -> Outcome:
    """Train on this rank until the end; everything that was opened is closed, whatever happens."""
    mesh = resolve_mesh(config, place.world_size)
    device = pick_device(config.train.device, place.local_rank)
    folder = run_folder(config.log.folder, config.save.url)
    with RankLogging(folder.log(place.rank), rank=place.rank, mesh=mesh, has_bar=config.log.progress) as logging_:
        try:
            with ExitStack() as stack:
                stop = stack.enter_context(_stop_request(config, place, folder))
                stack.enter_context(_process_group(config, place, device))
                first, last = config.log.trace_steps
                steps = range(first, last + 1) if last else range(0)
                phases = Phases(hook=_start_recorder(config, place, mesh, folder, stop, stack), steps=steps)
                return _train(config, place, mesh, device, folder, stop, phases, logging_.bar)
        except BaseException:
            log.info("training ends with an error", exc_info=True)
            raise


def _train(
    config: TrainConfig,
    place: RankPlace,
    mesh: MeshSpec,
    device: torch.device,
    folder: RunFolder,
    stop: StopRequest,
    phases: Phases,
    bar: ProgressLine | None,
) -> Outcome:
    launched_s = launched_at_s()
    with ExitStack() as stack:
        agreement = Agreement(timeout_s=max(config.train.init_timeout_s, config.save.timeout_s))
        tokenizer = open_tokenizer(config.data.tokenizer, separator=config.data.separator)
        check_vocabulary(tokenizer, config.model.vocab_size)
        dataset = _open_data(config, tokenizer, agreement, place)
        metrics = _open_metrics(config, folder, place, bar)
        stack.callback(metrics.close)
        names = [os.path.basename(folder.log(place.rank))] + ([METRICS, TRACE] if place.rank == 0 else [])
        stack.callback(lambda: upload_logs(folder, config.save.tiers, names))
        start = find_start(config.resume, config.save.tiers, agreement, config.model)
        torch.use_deterministic_algorithms(config.train.deterministic)
        parallelized = _build(config, mesh, device, start)
        freeze(parallelized, config.train.freeze, agreement)
        optimizer, progress = _begin(config, parallelized, start, dataset.fingerprint, agreement)
        exporter = saver = None
        if config.export.every and place.rank == 0:
            exporter = stack.enter_context(_exporter(config, metrics))
        if config.save.url:
            options = _save_options(config, mesh, phases, exporter)
            saver = stack.enter_context(Saver(config.save.url, options))
        job = Job(
            config=config, config_record=as_dict(config),
            assets=kept_assets(start, tokenizer.to_json()) if place.rank == 0 else {},
            parallelized=parallelized, optimizer=optimizer, dataset=dataset, saver=saver, exporter=exporter,
            agreement=agreement, stop=stop, phases=phases,
            inspection=_inspection(config, place, device, folder), metrics=metrics,
            upload_logs=lambda: upload_logs(folder, config.save.tiers, names),
        )  # fmt: skip
        _announce(job, place, start, progress)
        metrics.event("start", step=progress.step, launched_s=launched_s, mesh=str(mesh), world_size=mesh.world_size)
        outcome = Loop(job, progress).run()
        if exporter is not None:
            with phases("export", outcome.step):
                exporter.finish(outcome.committed_step, is_stopped=lambda: stop.code != NOTHING)
        _write_account(phases, agreement, place, mesh, folder)
        return outcome


def _begin(
    config: TrainConfig, parallelized: Parallelized, start: Start, fingerprint: str, agreement: Agreement
) -> tuple[Optimizer, Progress]:
    """The optimizer, with model and moments as `start` has them; adapters begin anew on another run's model."""
    adapters = adapters_of(parallelized.named_parameters())
    optimizer = build_optimizer(parallelized, config.optimizer, only=adapters or None)
    progress = restore(
        Start() if adapters and not start.is_own else start, parallelized, optimizer,
        agreement=agreement, fingerprint=fingerprint, other_data=config.resume.other_data,
    )  # fmt: skip
    return optimizer, progress


def _stop_request(config: TrainConfig, place: RankPlace, folder: RunFolder) -> StopRequest:
    """Signals and the time limit; a rank that is still here when its grace is over ends with an error."""

    def end(what: str) -> None:
        error = StoppedError(
            f"rank {place.rank} had not ended: {what} s are over. What was committed stands; "
            "raise save.grace_s if saving takes longer"
        )
        log.log(logging.INFO if is_launched_here() else logging.ERROR, "%s", error)
        write_error(folder, place.rank, error)
        os._exit(error.exit_code)

    return StopRequest(max_seconds=config.train.max_seconds, grace_s=config.save.grace_s, on_late=end)


def _exporter(config: TrainConfig, metrics: MetricsLog) -> Exporter:
    return Exporter(config.export, config.save.url, lambda outcome: metrics.event("export", **asdict(outcome)))


def _build(config: TrainConfig, mesh: MeshSpec, device: torch.device, start: Start) -> Parallelized:
    """The model; with adapters, on the weights that they adapt."""
    lora, seed = config.lora, config.train.seed
    if not lora.rank:
        return build(config.model, config.mesh, mesh, device=device, seed=seed)

    def extend(part: Decoder, ranks: RankMesh) -> set[str]:
        return add_adapters(part, lora, ranks)

    parallelized = build(config.model, config.mesh, mesh, device=device, seed=seed, extend=extend)
    start_adapters(parallelized.named_parameters())
    load_base(open_base(config.resume.from_, start, config.model), parallelized)
    return parallelized


def _inspection(config: TrainConfig, place: RankPlace, device: torch.device, folder: RunFolder) -> Inspection:
    asked = config.log
    return Inspection(
        folder=folder, rank=place.rank, device=device,
        profile_steps=asked.profile_steps, memory_steps=asked.memory_steps,
    )  # fmt: skip


def _save_options(config: TrainConfig, mesh: MeshSpec, phases: Phases, exporter: Exporter | None) -> SaveOptions:
    asked = config.save
    retention = None
    if asked.keep_last:
        retention = RetentionPolicy(keep_last=asked.keep_last, keep_every=asked.keep_every or None)
    return SaveOptions(
        mesh=mesh, pipeline=pipeline_record(config.model, config.mesh, mesh), codec=asked.codec,
        incremental=asked.incremental, mirror=asked.mirror or None, retention=retention, timeout_s=asked.timeout_s, phase=phases,
        in_use=no_steps if exporter is None else exporter.steps,
    )  # fmt: skip


@contextmanager
def _process_group(config: TrainConfig, place: RankPlace, device: torch.device) -> Iterator[None]:
    """torch.distributed for as long as the run lasts."""
    timeout = timedelta(seconds=config.train.init_timeout_s)
    os.environ.update({name: value for name, value in environment().items() if name not in os.environ})
    if place.world_size > 1:
        _join(place, BACKENDS[device.type], timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _start_recorder(
    config: TrainConfig, place: RankPlace, mesh: MeshSpec, folder: RunFolder, stop: StopRequest, stack: ExitStack
) -> PhaseHook | None:
    """The recorder of hangs, in a folder of this incident; its phase hook."""
    if not config.debug.recorder:
        return None
    incident = _incident_name(place)
    upload = None
    if config.save.url and not is_inside(folder, config.save.url):
        upload = join(config.save.url, DEBUG, incident)
    recorder = Recorder.start(
        os.path.join(folder.debug, incident), rank=place.rank, world_size=place.world_size,
        coordinates=mesh.coordinate(place.rank), stall_s=config.debug.stall_s, on_signal=stop.request, upload=upload,
    )  # fmt: skip
    stack.enter_context(recorder)
    return recorder.phase


def _incident_name(place: RankPlace) -> str:
    """The time at which this attempt started, the same on every rank: later ones sort behind."""
    name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    if place.world_size == 1:
        return name
    store = dist.distributed_c10d._get_default_store()
    if place.rank == 0:
        store.set("titan-ckpt/incident", name)
    return store.get("titan-ckpt/incident").decode()


def _join(place: RankPlace, backend: str, timeout: timedelta) -> None:
    try:
        with one_thread_groups():
            dist.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = (
            f"{os.environ.get('MASTER_ADDR', '(no MASTER_ADDR)')}:{os.environ.get('MASTER_PORT', '(no MASTER_PORT)')}"
        )
        raise TitanError(
            f"cannot meet the other {place.world_size - 1} ranks at {where}: {str(error).splitlines()[0]}. "
            "Give torchrun a free --master-port that all machines reach, or start without RANK and WORLD_SIZE in the environment"
        ) from error


def _open_data(config: TrainConfig, tokenizer: Tokenizer, agreement: Agreement, place: RankPlace) -> Dataset:
    """Local rank 0 tokenises, the others wait and then map the same files; an error of one is an error of all of its machine."""

    def open_it(is_writer: bool) -> Dataset:
        return open_dataset(config.data, config.validation, tokenizer, seed=config.train.seed, is_writer=is_writer)

    dataset = open_it(True) if place.local_rank == 0 else None
    agreement.wait()
    return dataset or open_it(False)


def _open_metrics(config: TrainConfig, folder: RunFolder, place: RankPlace, bar: ProgressLine | None) -> MetricsLog:
    if place.rank != 0:
        return MetricsLog([], total_steps=config.train.steps)
    path = folder.file(METRICS)
    for url in config.save.tiers:
        if not os.path.exists(path):
            _fetch_metrics(url, folder, path)
    board = os.path.join(folder.root, "tensorboard") if config.log.tensorboard else None
    remote: list[Sink] = []  # first, as it may refuse: nothing is open then that would have to be closed
    if config.log.wandb:
        name = os.path.basename(folder.root)
        remote.append(WeightsAndBiases(config.log.wandb, name=name, folder=folder.root, config=as_dict(config)))
    return MetricsLog([*open_sinks(path, board), *remote], total_steps=config.train.steps, bar=bar)


def _fetch_metrics(url: str, folder: RunFolder, path: str) -> None:
    """A run that goes on in a new place goes on with its history."""
    if is_inside(folder, url):
        return
    try:
        data = open_store(url).read(f"{LOGS}/{METRICS}")
    except NotFoundError:
        return
    except StoreError as error:
        log.warning("the history of metrics was not fetched: %s", error)
        return
    with open(path, "wb") as file:
        file.write(data)


def _write_account(phases: Phases, agreement: Agreement, place: RankPlace, mesh: MeshSpec, folder: RunFolder) -> None:
    """The trace, where one was asked for, and where the run's wall time went."""
    if phases.steps:
        _write_trace(phases, agreement, place, mesh, folder)
    if place.rank == 0:
        with open(folder.file(METRICS), encoding="utf-8") as file:
            log.info("%s", goodput(parse_metrics(file.read())).text())


def _write_trace(phases: Phases, agreement: Agreement, place: RankPlace, mesh: MeshSpec, folder: RunFolder) -> None:
    """The phases of all ranks as one file, by rank 0; a run that goes on after the steps leaves the file as it is."""
    name = describe_rank(mesh, place.rank)
    gathered = agreement.gathered(trace_events(phases.spans, rank=place.rank, name=name))
    if place.rank == 0 and phases.spans:
        write_trace(folder.file(TRACE), [event for events in gathered for event in events])
        log.info("trace of steps %d to %d: %s", phases.steps.start, phases.steps.stop - 1, folder.file(TRACE))


def freeze(parallelized: Parallelized, patterns: Sequence[str], agreement: Agreement) -> None:
    """Take weights whose names match a glob out of training; ConfigError for a glob that matches nothing on any rank."""
    names = parallelized.named_parameters()
    matched = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    counts = agreement.largest([len(found) for found in matched.values()] or [0])
    for pattern, count in zip(patterns, counts, strict=False):
        if not count:
            raise ConfigError(f"train.freeze: {pattern!r} matches no weight; one is called {next(iter(names))}")
    frozen = {name for found in matched.values() for name in found}
    for name in frozen:
        names[name].requires_grad_(False)
    if frozen:
        log.info("frozen: %d of %d weights of this rank", len(frozen), len(names))


def _announce(job: Job, place: RankPlace, start: Start, progress: Progress) -> None:
    """The first lines of a run: where it runs, what it trains, on what, from where."""
    config, mesh, shape = job.config, job.parallelized.mesh, job.batch_shape
    num_parameters = sum(p.numel() for p in job.parallelized.named_parameters().values())
    log.info("%s of mesh %s on %s", describe_rank(mesh, place.rank), mesh, job.parallelized.ranks.device)
    log.info("%s", describe_start(start, progress))
    log.info(
        "model: %.2f M parameters of this rank's stages, %s",
        num_parameters / 1e6,
        describe_precision(config.mesh, job.parallelized.ranks.device),
    )
    sizes = ", ".join(f"{len(t):,} tokens" for t in job.dataset.tokens)
    log.info("data: %s; unigram entropy %.3f nats", sizes, unigram_entropy(job.dataset.tokens[0]))
    log.info("batch: %d samples of %d tokens, %s", shape.global_batch_size, config.data.seq_len, _describe_batch(shape))
    tiers = ", then ".join(map(redact, config.save.tiers))
    log.info("checkpoints: %s", tiers or "none (save.url is empty)")
    if start.is_own and start.checkpoint is not None:
        changes = changed_settings(start.checkpoint, job.config_record)
        if changes:
            log.info("changed since the checkpoint: %s", ", ".join(changes))


def _describe_batch(shape: BatchShape) -> str:
    text = f"{shape.data_degree} data ranks x {shape.accumulation} microbatches of {shape.microbatch_size}"
    return text + (f", {shape.padding} masked samples to fill up" if shape.padding else "")
