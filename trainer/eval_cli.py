"""The arguments of `titan-ckpt eval`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from titan_ckpt.console.command import Command, add_json_flag

EPILOG = """\
Evaluates with the settings that the checkpoint records, or those of --config, on one rank, --nproc ranks or, under torchrun,
on its ranks; with more than one the mesh is FSDP unless --set says otherwise.

examples:
  titan-ckpt eval s3://bucket/run@1200
  titan-ckpt eval runs/tiny --set 'validation.sets=[{name="code", url="data/code.jsonl"}]'
  titan-ckpt eval runs/tiny --ema --nproc 4 --set mesh.tp=2
"""


def configure(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("checkpoint", metavar="URL[@STEP]", help="a checkpoint of a run, by default its newest")
    parser.add_argument("--config", metavar="CONFIG", help="a TOML file or recipe, in place of the recorded settings")
    parser.add_argument("--module", metavar="FILE.py", help="own model, loss, data or metrics, as of `train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set one value of the config")
    parser.add_argument("--ema", action="store_true", help="evaluate the averages that optimizer.ema_decay keeps")
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks to start on this machine (1)")
    add_json_flag(parser)


def run(arguments: Namespace) -> int:
    """Evaluate and print a line per set."""
    from titan_ckpt.trainer.eval_run import run as run_eval  # needs torch, which `--help` does not

    return run_eval(arguments)


EVAL = Command(configure=configure, run=run)
