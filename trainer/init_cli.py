"""`titan-ckpt init`: a commented config to start from."""

from __future__ import annotations

import os
import shlex
from argparse import Namespace

from titan_ckpt.console.command import Command, Parser
from titan_ckpt.console.output import format_table, write_text
from titan_ckpt.errors import StoreError, UsageError
from titan_ckpt.trainer.config.recipes import find_template, is_template, published, purpose, templates

DEFAULT = "tiny"
EPILOG = """\
examples:
  titan-ckpt init                              # writes tiny.toml
  titan-ckpt init --template 8b my-run.toml
  titan-ckpt init --template sft               # fine-tune a chat model; lora: only adapters
  titan-ckpt init --list
"""


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("file", nargs="?", metavar="FILE.toml", help="the config to write (default: TEMPLATE.toml)")
    parser.add_argument("--template", default=DEFAULT, metavar="NAME", help="recipe to start from (default: tiny)")
    parser.add_argument("--list", action="store_true", help="list the recipes, then stop")
    parser.excludes("--list", "FILE.toml", "--template")


def run(arguments: Namespace) -> int:
    """Write the config; a file that exists is left alone."""
    if arguments.list:
        rows = [[name, purpose(path)] for name, path in (templates() | published()).items()]
        write_text(format_table(["recipe", "for"], rows))
        return 0
    from titan_ckpt.trainer.config.starter import starter  # needs torch, which `--help` does not

    recipe = find_template(arguments.template)
    target = f"{recipe.stem}.toml" if arguments.file is None else arguments.file
    _check_name(target)
    text = starter(recipe)
    _write_new(target, text)
    write_text(
        f"wrote {target}: {purpose(recipe)}\nnext:  titan-ckpt train {shlex.quote(target)}\n"
        f"       titan-ckpt config --explain save.url    # what a setting means"
    )
    return 0


def _write_new(target: str, text: str) -> None:
    """Write `target`, whole or not at all. UsageError if it exists, StoreError if it cannot be written."""
    try:
        with open(target, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                os.unlink(target)
                raise
    except FileExistsError as error:
        raise UsageError(
            f"{target} exists and is left as it is; name another file: titan-ckpt init FILE.toml"
        ) from error
    except OSError as error:
        raise StoreError(f"{target}: {error.strerror}") from error


def _check_name(target: str) -> None:
    """UsageError for what is no name of a TOML file in a local folder that exists."""
    if "://" in target:
        raise UsageError(f"{target}: a config is a local file; write it here and copy it there")
    if not target.endswith(".toml"):
        meant = f"did you mean --template {target}? " if is_template(target) else ""
        raise UsageError(f"{target!r}: {meant}the name of a config ends with .toml")
    folder = os.path.dirname(target)
    if folder and not os.path.isdir(folder):
        raise UsageError(f"{target}: there is no folder {folder}; make it first")


INIT = Command(configure=configure, run=run)
