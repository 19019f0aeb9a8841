"""What `titan-ckpt train` does; `cli` has its arguments, and imports this when it runs."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NoReturn

from titan_ckpt.arguments import check_number, check_whole
from titan_ckpt.checkpoint.open import list_checkpoints, open_checkpoint
from titan_ckpt.console.output import OutputClosedError, are_events_wanted, flush, write_json, write_note, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_size, parse_size
from titan_ckpt.errors import INTERNAL, AlreadyExistsError, ConfigError, TitanError, UsageError
from titan_ckpt.location import join
from titan_ckpt.sharding.mesh import MAX_RANKS
from titan_ckpt.trainer.config.extension import Extension, load_extension
from titan_ckpt.trainer.config.model_from import fill_from
from titan_ckpt.trainer.config.recipes import find_config, recipe_of
from titan_ckpt.trainer.config.toml_records import Resolved, as_dict, render, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, config_type, resolve_mesh
from titan_ckpt.trainer.data.batches import reader_of
from titan_ckpt.trainer.data.corpus import list_files
from titan_ckpt.trainer.data.token_files import check_free, pretokenise
from titan_ckpt.trainer.data.tokenizer import open_tokenizer
from titan_ckpt.trainer.job.job import EndReason
from titan_ckpt.trainer.job.rank_process import RankProcess
from titan_ckpt.trainer.job.setup import run_rank
from titan_ckpt.trainer.launch.estimate import estimate_training
from titan_ckpt.trainer.launch.estimate_text import estimate_facts, format_estimate
from titan_ckpt.trainer.launch.gpus import GPUS
from titan_ckpt.trainer.launch.launch import (
    MAX_LOCAL_RANKS,
    check_ranks,
    end_with_launcher,
    is_launched_here,
    is_rank,
    launch,
    num_ranks,
    refuse_as_rank,
    tell_torchrun,
    write_error,
)
from titan_ckpt.trainer.launch.planner import CHOSEN, format_plan, search
from titan_ckpt.trainer.launch.preflight import preflight
from titan_ckpt.trainer.launch.published import compare
from titan_ckpt.trainer.launch.save_schedule import save_schedule
from titan_ckpt.trainer.model.lora import export_adapter
from titan_ckpt.trainer.report.logs import RunFolder, run_folder


def run(arguments: Namespace) -> int:
    """Print the config, an estimate or a plan, run as a rank, or start ranks."""
    _check_numbers(arguments)
    if arguments.export_adapter is not None and _is_checkpoint(arguments.config):
        for option in arguments.given & {"--set", "--module"}:
            raise UsageError(f"{option} has no effect: {arguments.config} is a checkpoint, which records its settings")
        return export_to_peft(arguments.config, arguments.export_adapter)
    resolved = _resolve(arguments)
    if arguments.print_config:
        resolve_mesh(resolved.config, num_ranks(resolved.config, arguments.nproc))
        if arguments.json:
            write_json(as_dict(resolved.config), indent=None)
        else:
            write_text(render(resolved))
        return 0
    if arguments.pretokenise is not None:
        return pretokenise_all(resolved.config, arguments.pretokenise)
    if arguments.export_adapter is not None:
        return _export_newest(resolved.config, arguments.export_adapter)
    if arguments.plan:
        return show_plan(resolved.config, arguments)
    if arguments.estimate:
        return show_estimate(resolved.config, arguments)
    if is_rank():
        return run_as_rank(resolved, arguments.given)
    world_size = num_ranks(resolved.config, arguments.nproc)
    resolve_mesh(resolved.config, world_size)
    if not 1 <= world_size <= MAX_LOCAL_RANKS:
        raise ConfigError(
            f"{world_size} ranks to start here: expected 1 to {MAX_LOCAL_RANKS} (--nproc, or the degrees of [mesh])"
        )
    preflight(resolved.config)
    if world_size == 1 and not arguments.restarts:
        outcome = run_rank(resolved.config, RankProcess())
        return 130 if outcome.reason is EndReason.SIGNAL else 0
    folder = run_folder(resolved.config.log.folder, resolved.config.save.url)
    return launch(_again(arguments), resolved.config, folder, nproc=world_size, restarts=arguments.restarts)


def _check_numbers(arguments: Namespace) -> None:
    check_ranks("--nproc", arguments.nproc, MAX_RANKS)
    check_ranks("--gpus", arguments.gpus, MAX_RANKS)
    check_whole(arguments.restarts, "--restarts", at_least=0)
    check_number(arguments.rank_mtbf_hours, "--rank-mtbf-hours", above=0)
    upload_rate(arguments)


def show_estimate(config: TrainConfig, arguments: Namespace) -> int:
    """Print what a rank of the mesh needs."""
    mesh = resolve_mesh(config, num_ranks(config, arguments.nproc))
    found, row = estimate_training(config, mesh), compare(arguments.config, config, mesh)
    rate = upload_rate(arguments)
    saves = save_schedule(
        found.checkpoint_bytes_per_rank, mesh.world_size, rank_mtbf_h=arguments.rank_mtbf_hours, bandwidth=rate
    )
    if arguments.json:
        write_json(estimate_facts(found, saves, row), indent=None)
    else:
        write_text(format_estimate(found, saves, row))
    return 0


def show_plan(config: TrainConfig, arguments: Namespace) -> int:
    """Search the meshes of a cluster and print the fastest."""
    if arguments.gpus is None:
        raise UsageError(f"--plan: --gpus is missing: give the number of GPUs, 1 to {MAX_RANKS}")
    for text in arguments.set:
        if (key := text.partition("=")[0].strip()) in CHOSEN:
            raise UsageError(f"--set {text} has no effect with --plan, which chooses {key} itself; leave it out")
    gpu, rate = GPUS[arguments.gpu], upload_rate(arguments)
    found = search(config, arguments.gpus, gpu)
    if arguments.json:
        write_json(
            {"gpu": gpu.name, "gpus": arguments.gpus, "plans": [choice.facts(rate) for choice in found.best]},
            indent=None,
        )
    else:
        write_text(format_plan(found, config, gpu, rate))
    return 0


def upload_rate(arguments: Namespace) -> int:
    """--upload-rate in bytes per second."""
    rate = parse_size(arguments.upload_rate)
    if rate <= 0:
        raise UsageError(f"--upload-rate {arguments.upload_rate}: must be more than 0")
    return rate


def _resolve(arguments: Namespace) -> Resolved[TrainConfig]:
    """The config, checked; torchrun is told of an error in it, too."""
    try:
        extension = load_extension(arguments.module) if arguments.module else Extension()
        resolved = resolve(config_type(extension), find_config(arguments.config), arguments.set, fill_from)
        check_config(resolved.config)
        origins = {key: recipe_of(origin) for key, origin in resolved.origins.items()}
    except TitanError as error:
        tell_torchrun(str(error))
        raise
    return Resolved(config=resolved.config, origins=origins)


def _is_checkpoint(name: str) -> bool:
    """Whether what stands in the config's place names a checkpoint."""
    return not os.path.isfile(name) and ("://" in name or "@" in name or os.path.isdir(name))


def _export_newest(config: TrainConfig, destination: str) -> int:
    if not config.save.url:
        raise UsageError("--export-adapter reads the newest checkpoint of save.url, which is empty; give it with --set")
    return export_to_peft(config.save.url, destination)


def export_to_peft(url: str, destination: str) -> int:
    """Write the adapters of a checkpoint as a PEFT folder."""
    checkpoint = open_checkpoint(url)
    count = export_adapter(checkpoint, destination)
    write_text(f"{destination}: {count} factors of {checkpoint}")
    return 0


def pretokenise_all(config: TrainConfig, destination: str) -> int:
    """Tokenise the source into `destination`, several into numbered folders below it. ConfigError for other than text."""
    for source in config.data.sources:
        if source.format in ("chat", "tokens", "nanogpt", "megatron"):
            raise ConfigError(f"--pretokenise writes token files of text; {source.url} is read as {source.format!r}")
    several = len(config.data.sources) > 1
    targets = [
        join(destination, f"{number:02d}") if several else destination for number in range(len(config.data.sources))
    ]
    for target in targets:
        check_free(target)
        if list_checkpoints(target):
            raise AlreadyExistsError(f"{target} holds checkpoints; give the token files a folder of their own")
    tokenizer = open_tokenizer(config.data.tokenizer, separator=config.data.separator)
    for source, target in zip(config.data.sources, targets, strict=True):
        files, reader = list_files(source.url), reader_of(source, config.data)
        header = pretokenise(files, tokenizer, reader, target, progress=_TokeniseProgress(source.url))
        write_text(f"{target}: {header.num_tokens} tokens of {header.num_documents} documents")
    return 0


class _TokeniseProgress:
    """The progress line on a terminal, a line per tenth elsewhere; on stderr."""

    def __init__(self, what: str) -> None:
        self._what, self._tenths = what, 0
        self._line = ProgressLine(what) if sys.stderr.isatty() or are_events_wanted() else None

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are done."""
        share = done / total if total else 1.0
        if self._line is not None:
            self._line.show(done, total)
            if done == total:
                self._line.close()
        elif int(10 * share) > self._tenths:
            self._tenths = int(10 * share)
            write_note(f"{self._what}: {share:.0%} of {format_size(total)}")


def run_as_rank(resolved: Resolved[TrainConfig], given: Collection[str]) -> int:
    """Train as one rank; an error is written to a file for the launcher, which reports it.

    If a signal reached only other ranks, whose node is leaving, exit with 130 under torchrun: this node's agent, which was not
    asked to stop, then restarts the job without that node.
    """
    refuse_as_rank(given, "--nproc", "--restarts")
    process = RankProcess.from_environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    try:
        outcome = run_rank(resolved.config, process)
    except Exception as error:  # noqa: BLE001 - told to whoever started the ranks
        leave_with(error, run_folder(resolved.config.log.folder, resolved.config.save.url), process.rank)
    return 130 if outcome.is_from_other_rank and not is_launched_here() else 0


def leave_with(error: Exception, folder: RunFolder, rank: int) -> NoReturn:
    """End this rank with the error's exit code, and leave the error to whoever started the ranks."""
    record = write_error(folder, rank, error)
    if not is_launched_here():
        if record.exit_code == INTERNAL:
            raise error
        write_note(f"titan-ckpt: error: rank {rank}: {record.message}")
    _leave(record.exit_code)


def _leave(exit_code: int) -> NoReturn:
    """Exit at once, since threads of a failed process group may never finish."""
    with suppress(TitanError, OutputClosedError):  # the exit code says what matters
        flush()
    os._exit(exit_code)


def _again(arguments: Namespace) -> Sequence[str]:
    config = os.path.join(os.getcwd(), find_config(arguments.config))
    again = [config, *(part for text in arguments.set for part in ("--set", text))]
    return [*again, "--module", arguments.module] if arguments.module else again
