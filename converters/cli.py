"""`titan-ckpt convert`: a thin layer over `export_hf`, `import_hf` and `torch_file`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from titan_ckpt.checkpoint.foreign_files import check_own_files
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.escapes import escape_line
from titan_ckpt.console.output import write_json, write_text
from titan_ckpt.console.progress import ProgressLine
from titan_ckpt.console.units import format_size, parse_size
from titan_ckpt.converters.hf.assets import CONFIG
from titan_ckpt.converters.hf.config import Config, parse_config
from titan_ckpt.converters.hf.export_plan import DEFAULT_SHARD_BYTES, plan_export
from titan_ckpt.converters.hf.export_run import of_averages, read_adapter, run_export
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.hf.import_plan import plan_import
from titan_ckpt.converters.hf.import_run import check_import, run_import
from titan_ckpt.converters.hf.publish import check_new
from titan_ckpt.converters.hf.verify import Verification, verify_export
from titan_ckpt.converters.models.tensor_names import LAYOUTS, TITAN, is_computed
from titan_ckpt.converters.models.transforms import FLOATS
from titan_ckpt.errors import UsageError
from titan_ckpt.format.names import new_attempt
from titan_ckpt.location import join, parse_location
from titan_ckpt.store.open import open_store

if TYPE_CHECKING:
    from titan_ckpt.converters.torch_file import TorchReport


EXAMPLES = {
    "to-hf": "titan-ckpt convert to-hf s3://bucket/run@1200 ./my-model --dtype bfloat16 --verify",
    "from-hf": "titan-ckpt convert from-hf ./my-model runs/from-hf",
    "from-torch": "titan-ckpt convert from-torch weights.pt runs/imported --under model",
    "to-torch": "titan-ckpt convert to-torch runs/tiny@20 weights.pt --only model",
}


def configure(parser: Parser) -> None:
    """Add the sub-commands and their arguments."""
    parser.epilog = "examples:\n" + "".join(f"  {line}\n" for line in EXAMPLES.values())
    commands = parser.add_subparsers(dest="direction", metavar="DIRECTION", required=True)
    to_hf = commands.add_parser("to-hf", help="a checkpoint's model as a Hugging Face folder or prefix")
    to_hf.add_argument("src", metavar="RUN[@STEP]")
    to_hf.add_argument("dst", metavar="DST", help="a folder or prefix that does not exist yet")
    to_hf.add_argument("--max-shard-size", type=parse_size, default=DEFAULT_SHARD_BYTES, metavar="SIZE", help="5GB")
    to_hf.add_argument("--config", metavar="PATH", help="a config.json, for checkpoints that do not record their model")
    to_hf.add_argument("--merge-lora", metavar="PATH", help="a PEFT adapter's folder, merged into the weights")
    to_hf.add_argument(
        "--ema", action="store_true", help="the averages of the weights (optimizer.ema_decay), not the weights"
    )
    to_hf.add_argument("--verify", action="store_true", help="read back every byte; compare logits with transformers")
    to_hf.excludes("--verify", "--dry-run")
    to_hf.set_defaults(convert=_to_hf)
    from_hf = commands.add_parser("from-hf", help="a Hugging Face model as a checkpoint")
    from_hf.add_argument("src", metavar="SRC", help="a folder, a hub cache's models--... folder, or a prefix")
    from_hf.add_argument("dst", metavar="RUN[@STEP]", help="step 0 if none is given")
    from_hf.add_argument("--layout", choices=list(LAYOUTS), default=TITAN, help="whose tensor names (default: titan)")
    from_hf.set_defaults(convert=_from_hf)
    to_torch = commands.add_parser("to-torch", help="a checkpoint as one torch file (.pt)")
    to_torch.add_argument("src", metavar="RUN[@STEP]")
    to_torch.add_argument("dst", metavar="FILE")
    to_torch.add_argument("--only", default="", metavar="NAME", help="names below NAME only, without it; e.g. model")
    to_torch.set_defaults(convert=_to_torch)
    from_torch = commands.add_parser(
        "from-torch", help="a torch file's state dict as a checkpoint (weights-only rules)"
    )
    from_torch.add_argument("src", metavar="FILE")
    from_torch.add_argument("dst", metavar="RUN[@STEP]", help="step 0 if none is given")
    from_torch.add_argument("--under", default="", metavar="NAME", help="put all names below NAME; e.g. model")
    from_torch.set_defaults(convert=_from_torch)
    for name, command in commands.choices.items():
        command.epilog = f"example:\n  {EXAMPLES[name]}\n"
    for command in (to_torch, from_torch):
        command.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    for command in (to_hf, from_hf):
        command.add_argument("--dtype", choices=FLOATS, metavar="D", help="cast floating-point tensors (default: keep)")
        command.add_argument("-n", "--dry-run", action="store_true", help="check and show, write nothing")
        command.add_argument("--json", action="store_true", help="the result as JSON on stdout")


def run(arguments: Namespace) -> int:
    """Run the requested direction."""
    return int(arguments.convert(arguments))


def _to_hf(arguments: Namespace) -> int:
    checkpoint = open_checkpoint(arguments.src)
    checkpoint = of_averages(checkpoint) if arguments.ema else checkpoint
    config = None if arguments.config is None else _read_config(arguments.config)
    adapter = None if arguments.merge_lora is None else read_adapter(arguments.merge_lora)
    plan = plan_export(
        checkpoint,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard_size,
        config=config,
        adapter=adapter,
    )
    facts: dict[str, Any] = {
        "source": str(checkpoint),
        "destination": arguments.dst,
        "family": plan.spec.family,
        "tensors": len(plan.tensors),
        "bytes": plan.size_bytes,
        "files": list(plan.names),
        "left_out": plan.left_out,
        "not_carried": dict(plan.not_carried),
        "written": not arguments.dry_run,
    }
    result: Verification | None = None
    if arguments.dry_run:
        check_new(arguments.dst)
    else:
        with ProgressLine("convert", plan.size_bytes) as progress:
            report = run_export(checkpoint, plan, arguments.dst, on_progress=progress.add)
        facts["overflowed"] = report.overflowed
        if arguments.verify:
            result = verify_export(checkpoint, plan, report)
            facts["verification"] = result.as_json()
    _show(facts, as_json=arguments.json)
    if result is not None and not arguments.json:
        write_text(_verdict(result))
    return 0 if result is None or result.is_equal else 1


def _from_hf(arguments: Namespace) -> int:
    model = open_hf(arguments.src)
    location = parse_location(arguments.dst)
    plan = plan_import(
        model, dtype=arguments.dtype, step=location.step or 0, attempt=new_attempt(), layout=arguments.layout
    )
    if arguments.dry_run:
        check_import(plan, location.url)
    else:
        with ProgressLine("convert", plan.size_bytes) as progress:
            run_import(plan, location.url, on_progress=progress.add)
    facts: dict[str, Any] = {
        "source": str(model.store),
        "destination": f"{location.url}@{plan.step}",
        "family": plan.spec.family,
        "tensors": len({chunk.tensor.fqn for chunk in plan.chunks}),
        "bytes": plan.size_bytes,
        "files": sorted(model.assets),
        "left_out": plan.left_out,
        "not_carried": dict(model.left_out),
        "written": not arguments.dry_run,
    }
    if not arguments.dry_run:
        facts["overflowed"] = sorted(plan.overflows.names)
    _show(facts, as_json=arguments.json)
    return 0


def _to_torch(arguments: Namespace) -> int:
    from titan_ckpt.converters.torch_file import (
        export_torch,
    )  # imports torch (seconds), which the other directions do not need

    with ProgressLine("convert") as progress:
        report = export_torch(arguments.src, arguments.dst, only=arguments.only, on_progress=progress.show)
    return _show_torch(report, as_json=arguments.json)


def _from_torch(arguments: Namespace) -> int:
    from titan_ckpt.converters.torch_file import import_torch

    with ProgressLine("convert") as progress:
        report = import_torch(arguments.src, arguments.dst, under=arguments.under, on_progress=progress.show)
    return _show_torch(report, as_json=arguments.json)


def _show_torch(report: TorchReport, *, as_json: bool) -> int:
    if as_json:
        write_json(asdict(report))
    else:
        size = format_size(report.size_bytes)
        write_text(f"wrote {report.url}: {report.num_tensors} tensors, {report.num_values} other values, {size}\n")
    return 0


def _read_config(path: str) -> Config:
    """The config.json at `path`, which may be its folder."""
    folder, _, name = path.rpartition("/")
    if name != CONFIG:
        folder = path
    store = open_store(folder or ("/" if path.startswith("/") else "."))
    check_own_files(store, [CONFIG])
    if not store.exists(CONFIG):
        raise UsageError(f"--config {path}: no {CONFIG} there")
    return parse_config(store.read(CONFIG), join(str(store), CONFIG))


def _show(facts: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write_json(facts)
        return
    verb = "wrote" if facts["written"] else "would write"
    size = format_size(facts["bytes"])
    write_text(
        f"{verb} {facts['destination']}: a {facts['family']} model, {facts['tensors']} tensors, {size}\n"
        f"  from   {facts['source']}\n  files  {escape_line(', '.join(facts['files']))}\n"
    )
    computed = [name for name in facts["left_out"] if is_computed(name)]
    predicting = [name for name in facts["left_out"] if not is_computed(name)]
    for why, names in ("every reader computes them", computed), ("they predict further tokens (MTP)", predicting):
        if names:
            write_text(f"  left out, since {why}: {escape_line(', '.join(names[:3]))}{_more(names[3:])}")
    if others := [f"{name!r} ({why})" for name, why in facts["not_carried"].items()]:
        write_text(f"  not carried: {escape_line(', '.join(others[:5]))}{_more(others[5:])}")


def _more(names: list[str]) -> str:
    return f" and {len(names)} more" if names else ""


def _verdict(result: Verification) -> str:
    lines = [f"  bytes  {result.tensors} tensors read back, all equal ({format_size(result.bytes)})"]
    logits = result.logits
    if logits is None:
        return lines[0] + f"\n  logits not compared: {result.why_no_logits}\n"
    where = f"; first difference: {logits.first_layer}" if logits.first_layer else ""
    lines.append(
        f"  logits {'equal' if result.is_equal else 'DIFFER'} over {logits.tokens} tokens: max |difference| "
        f"{logits.max_abs_difference:.2g}, KL {logits.kl:.2g}, top-1 {logits.top1_agreement:.1%}{where}"
    )
    return "\n".join(lines) + "\n"


CONVERT = Command(configure=configure, run=run)
