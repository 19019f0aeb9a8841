"""The arguments of `titan-ckpt train`. They need no torch, so that `--help` is there without it."""

from __future__ import annotations

from argparse import Namespace

from titan_ckpt.console.command import Command, Parser
from titan_ckpt.trainer.launch.gpus import GPUS

EPILOG = """\
Starts as many ranks as the mesh has; with mesh.dp_shard = -1 it is --nproc, or one per accelerator. Under torchrun it starts
none. On SIGTERM and SIGINT it commits a last checkpoint and exits with code 130; under torchrun with 0, since torchrun counts
other codes as failures, but with 130 on nodes that were not asked to stop, so that they restart.

examples:
  titan-ckpt train tiny --set save.url=s3://bucket/run --set save.every=20
  titan-ckpt train tiny --set mesh.dp_shard=2 --set mesh.tp=2
  titan-ckpt train my-run.toml --set data.source=s3://corpus/*.jsonl.zst --pretokenise s3://corpus/tokens
  titan-ckpt train llama3_70b --nproc 256 --estimate
  titan-ckpt train llama3_70b --plan --gpus 256 --gpu h100 --set train.global_batch_size=1024
  titan-ckpt train my-run.toml --module my_model.py
  torchrun --nnodes=8 --nproc-per-node=8 ... -m titan_ckpt train my-run.toml
"""


def configure(parser: Parser) -> None:
    """Declare the arguments of `train`."""
    parser.epilog = EPILOG
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, or a recipe: `titan-ckpt init --list`")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="set one value; the right side is TOML"
    )
    parser.add_argument(
        "--module",
        metavar="FILE.py",
        help="own model, loss, data, ...: a file, a module, or what an installed package offers",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show every value and where it comes from, then stop"
    )
    parser.add_argument(
        "--pretokenise", metavar="DST", help="write [data] as token files to a folder or URL, then stop"
    )
    parser.add_argument(
        "--export-adapter",
        metavar="DST",
        help="write the newest checkpoint's LoRA adapters as a PEFT folder, then stop; CONFIG may be a checkpoint",
    )
    parser.add_argument(
        "--estimate", action="store_true", help="print memory, traffic and checkpoints per rank, then stop"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print the ten fastest meshes of a cluster (--gpus, --gpu), predicted, then stop",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the cluster, for --plan")
    parser.add_argument("--gpu", choices=list(GPUS), default="h100", help="kind of GPU, for --plan (h100)")
    parser.add_argument("--json", action="store_true", help="--print-config, --estimate and --plan as JSON")
    parser.add_argument("--rank-mtbf-hours", type=float, default=50_000.0, metavar="H", help="for --estimate (50000)")
    parser.add_argument(
        "--upload-rate",
        default="1GB",
        metavar="SIZE",
        help="bytes per second and rank, for --estimate and --plan (1GB)",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="ranks to start on this machine")
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="start the ranks again after a failure, at most N times"
    )
    _add_rules(parser)


def _add_rules(parser: Parser) -> None:
    modes = ("--print-config", "--pretokenise", "--export-adapter", "--estimate", "--plan")
    for number, mode in enumerate(modes):
        parser.excludes(mode, *modes[number + 1 :])
    for option in ("--gpus", "--gpu"):
        parser.needs(option, "--plan")
    parser.needs("--rank-mtbf-hours", "--estimate")
    parser.needs("--upload-rate", "--estimate", "--plan")
    parser.needs("--json", "--print-config", "--estimate", "--plan")
    parser.excludes("--nproc", "--pretokenise", "--export-adapter", "--plan")
    parser.excludes("--restarts", *modes)


def run(arguments: Namespace) -> int:
    """Train, or do what an option asks for instead."""
    from titan_ckpt.trainer.train_run import run as run_train

    return run_train(arguments)


TRAIN = Command(configure=configure, run=run)
