"""What `titan-ckpt eval` does: the settings of a checkpoint, the ranks, the table."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.output import format_table, write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.errors import ConfigError, UsageError
from titan_ckpt.trainer.config.extension import Extension, load_extension
from titan_ckpt.trainer.config.recipes import find_config
from titan_ckpt.trainer.config.toml_records import build_record, merge_sets, resolve
from titan_ckpt.trainer.config.train_config import TrainConfig, check_config, config_type
from titan_ckpt.trainer.job.evaluate import evaluate_rank
from titan_ckpt.trainer.job.rank_process import RankProcess
from titan_ckpt.trainer.launch.launch import MAX_LOCAL_RANKS, check_ranks, is_rank, launch, refuse_as_rank
from titan_ckpt.trainer.launch.preflight import check_kernels
from titan_ckpt.trainer.report.logs import run_folder
from titan_ckpt.trainer.train_run import leave_with

DEGREES = {
    "pp": 1,
    "dp_replicate": 1,
    "dp_shard": -1,
    "cp": 1,
    "tp": 1,
    "ep": 1,
    "etp": 1,
    "async_tp": False,
    "pp_layers_per_stage": [],
    "cpu_offload": False,
}

_OFF = {
    "save.url": '""', "save.mirror": '""', "save.every": 0, "save.keep_last": 0, "save.keep_every": 0,
    "export.every": 0, "validation.every": 0,
}  # fmt: skip

_WITHOUT_EFFECT = ("save.", "export.", "validation.every=", "resume.auto=")


def run(arguments: Namespace) -> int:
    """Evaluate as a rank, alone, or on ranks that are started."""
    check_ranks("--nproc", arguments.nproc, MAX_LOCAL_RANKS)
    if is_rank():
        refuse_as_rank(arguments.given, "--nproc")
    checkpoint = open_checkpoint(arguments.checkpoint)
    config = _config(arguments, checkpoint.manifest.config)
    if not is_rank() and arguments.nproc > 1:
        check_kernels(config)
        words = _again(arguments, checkpoint.url, checkpoint.step)
        folder = run_folder(config.log.folder, "")
        return launch(words, config, folder, nproc=arguments.nproc, command="eval")
    process = RankProcess.from_environment() if is_rank() else RankProcess()
    try:
        with ProgressLine("eval", unit="microbatches", is_shown=process.rank == 0) as progress:
            found = evaluate_rank(
                config, process, checkpoint.url, checkpoint.step, averaged=arguments.ema, on_progress=progress.show
            )
    except Exception as error:
        if not is_rank():
            raise
        leave_with(error, run_folder(config.log.folder, ""), process.rank)
    if process.rank == 0:
        _show(arguments, checkpoint.step, found)
    return 0


def _config(arguments: Namespace, recorded: Any) -> TrainConfig:
    """The settings to evaluate with: nothing is saved, resumed or trained."""
    for text in arguments.set:
        if text.startswith(_WITHOUT_EFFECT):
            raise UsageError(
                f"--set {text} has no effect: `eval` neither saves, exports nor resumes a run; leave it out"
            )
    extension = load_extension(arguments.module) if arguments.module else Extension()
    kind = config_type(extension)
    sets = [f"{name}={value}" for name, value in _OFF.items()]
    if arguments.config is not None:
        config = resolve(kind, find_config(arguments.config), [*sets, *arguments.set]).config
    else:
        if "data" not in (recorded or {}):  # a Hugging Face folder has [model] alone
            raise UsageError(f"{arguments.checkpoint} records no data to evaluate on; give the settings with --config")
        tree = {name: dict(table) for name, table in recorded.items()}
        tree["mesh"] = tree.get("mesh", {}) | DEGREES
        merge_sets(tree, [*sets, *arguments.set], {})
        try:
            config = build_record(kind, tree, {})
        except ConfigError as error:
            hint = "" if arguments.module else "; if --module gave the run its model, give that here, too"
            raise ConfigError(f"{error}{hint}") from error
    check_config(config)
    return config


def _show(arguments: Namespace, step: int, found: dict[str, dict[str, float]]) -> None:
    if arguments.json:
        write_json({"step": step, "ema": arguments.ema, "sets": found}, indent=None)
        return
    names = [name for name in next(iter(found.values())) if name != "tokens"]
    rows = [
        [name, *(f"{numbers[key]:.4f}" for key in names), f"{numbers['tokens']:,.0f}"]
        for name, numbers in found.items()
    ]
    write_text(format_table(["set", *names, "tokens"], rows))


def _again(arguments: Namespace, url: str, step: int) -> list[str]:
    words = [f"{url}@{step}", *(part for text in arguments.set for part in ("--set", text))]
    for name in ("config", "module"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", find_config(value) if name == "config" else value]
    return [*words, *(["--ema"] if arguments.ema else []), *(["--json"] if arguments.json else [])]
