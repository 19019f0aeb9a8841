"""The `titan-ckpt` command line: a table of commands, each loaded only when it is called."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from titan_ckpt.arguments import check_word, nearest
from titan_ckpt.cli.failures import nothing_printed_elsewhere, report_failure, write_json_error
from titan_ckpt.console.background import end_beside_threads
from titan_ckpt.console.command import Command, CommandParser, Parser, ParserExit
from titan_ckpt.console.output import (
    OutputClosedError,
    drop_unwritten,
    events_on_stderr,
    flush,
    open_closed_streams,
    quiet,
)
from titan_ckpt.console.store_arguments import (
    add_store_arguments,
    check_urls,
    split_store_arguments,
    store_options,
    store_words,
)
from titan_ckpt.errors import INTERRUPTED, OUTPUT_CLOSED, MissingExtraError, UsageError
from titan_ckpt.location import scheme
from titan_ckpt.store.clients.options import CLIENTS, StoreSettings, settings_of_command
from titan_ckpt.version import __version__

# Each command's module is imported when the command runs, so that `ls` starts without torch and `debug` without the trainer.


def _train() -> Command:
    from titan_ckpt.trainer.cli import TRAIN

    return TRAIN


def _eval() -> Command:
    from titan_ckpt.trainer.eval_cli import EVAL

    return EVAL


def _init() -> Command:
    from titan_ckpt.trainer.init_cli import INIT

    return INIT


def _config() -> Command:
    from titan_ckpt.trainer.config_cli import CONFIG

    return CONFIG


def _doctor() -> Command:
    from titan_ckpt.cli.doctor import DOCTOR

    return DOCTOR


def _plot() -> Command:
    from titan_ckpt.trainer.report.plot import PLOT

    return PLOT


def _ls() -> Command:
    from titan_ckpt.cli.ls import LS

    return LS


def _inspect() -> Command:
    from titan_ckpt.cli.inspect import INSPECT

    return INSPECT


def _verify() -> Command:
    from titan_ckpt.cli.verify import VERIFY

    return VERIFY


def _diff() -> Command:
    from titan_ckpt.cli.diff import DIFF

    return DIFF


def _reshard() -> Command:
    from titan_ckpt.cli.reshard import RESHARD

    return RESHARD


def _cp() -> Command:
    from titan_ckpt.cli.cp import CP

    return CP


def _prune() -> Command:
    from titan_ckpt.cli.prune import PRUNE

    return PRUNE


def _convert() -> Command:
    from titan_ckpt.converters.cli import CONVERT

    return CONVERT


def _debug() -> Command:
    from titan_ckpt.debug.cli import DEBUG

    return DEBUG


def _tui() -> Command:
    from titan_ckpt.tui.cli import TUI

    return TUI


def _demo() -> Command:
    from titan_ckpt.demo.cli import DEMO

    return DEMO


def _completion() -> Command:
    from titan_ckpt.cli.completion import COMPLETION

    return COMPLETION


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command's loader and its one-line help."""

    load: Callable[[], Command]
    help: str


COMMANDS = {
    "init": CommandEntry(_init, "write a commented config to start from"),
    "train": CommandEntry(_train, "train a model from a TOML config, saving to any store"),
    "eval": CommandEntry(_eval, "evaluate a checkpoint on validation sets, on any mesh"),
    "config": CommandEntry(_config, "list what a config can set, and explain it"),
    "plot": CommandEntry(_plot, "draw a run's loss, throughput and checkpoints as an SVG"),
    "ls": CommandEntry(_ls, "list a run's checkpoints"),
    "inspect": CommandEntry(_inspect, "show what a checkpoint holds: mesh, tensors, files"),
    "verify": CommandEntry(_verify, "check a checkpoint; --data re-reads every byte"),
    "diff": CommandEntry(_diff, "compare two checkpoints"),
    "reshard": CommandEntry(_reshard, "rewrite a checkpoint for another mesh, without GPUs"),
    "cp": CommandEntry(_cp, "mirror a checkpoint to another store, verified"),
    "prune": CommandEntry(_prune, "delete old checkpoints by a policy; previews unless --yes"),
    "convert": CommandEntry(_convert, "convert from and to Hugging Face"),
    "debug": CommandEntry(_debug, "name the rank and line at fault in a hung or dead job"),
    "tui": CommandEntry(_tui, "browse hangs, checkpoints and training in the terminal"),
    "doctor": CommandEntry(_doctor, "check this machine: Python, torch, devices, network, memory, stores"),
    "demo": CommandEntry(_demo, "train, kill, resume, reshard, export and debug, on this machine alone"),
    "completion": CommandEntry(_completion, "print what makes a shell complete commands, options and steps"),
}

EPILOG = """\
examples:
  titan-ckpt train tiny --set save.url=s3://bucket/run
  titan-ckpt reshard s3://bucket/run@1200 s3://bucket/run-64 --mesh pp=2,dp_shard=8,tp=4
  titan-ckpt convert to-hf s3://bucket/run@1200 ./my-model --dtype bfloat16
  titan-ckpt debug s3://bucket/run

URL@STEP names a checkpoint; a bare run URL names its newest committed one.
exit codes: 0 fine, 1 a finding, 2 usage or config, 3 the operation failed, 70 a bug, 130 interrupted, 141 output closed;
debug: 4 the evidence does not decide, 5 the job runs
"""


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser; only command `only` is loaded and given its arguments (all of them when None)."""
    parser = Parser(
        prog="titan-ckpt",
        description="Train, reshard, convert and debug with checkpoints at the centre.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    parser.add_argument("-v", "--verbose", action="store_true", help="log at INFO to stderr")
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and errors alone")
    parser.add_argument(
        "--progress", choices=["auto", "json"], default="auto",
        help="json: everything on stderr as events, one JSON object per line (docs/bots.md); auto: a line on a terminal",
    )  # fmt: skip
    parser.excludes("--verbose", "--quiet")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, entry in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=entry.help,
            description=entry.help[0].upper() + entry.help[1:] + ".",
        )
        if only is None or only == name:
            command = load_command(name)
            command.configure(subparser)
            add_to_all(subparser)
            subparser.set_defaults(run=command.run)
    return parser


def add_to_all(parser: argparse.ArgumentParser) -> None:
    """Show the store arguments in the help of a command, and of each of its sub-commands."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for child in action.choices.values():
            add_to_all(child)
    if not inner:
        add_store_arguments(parser)


def load_command(name: str) -> Command:
    """Import the module of command `name`; MissingExtraError if it needs a library that an extra installs."""
    try:
        return COMMANDS[name].load()
    except ModuleNotFoundError as error:
        raise missing_extra(error, name) from error


_EXTRA_OF = {
    "torch": "torch", "torchao": "train", "tokenizers": "train", "tensorboard": "train",
    "transformers": "hf", "safetensors": "hf", "botocore": "s3",
}  # fmt: skip


# Commands that need a whole extra, whichever of its libraries is missed first: all of them, or torch.
_EXTRA_OF_COMMAND = {"demo": "demo"}
_TORCH_OF_COMMAND = {"train": "train", "eval": "train", "init": "train", "config": "train"}


def missing_extra(error: ModuleNotFoundError, command: str) -> Exception:
    """The error to raise for a failed import: MissingExtraError if an extra brings the library, else `error` itself."""
    library = (error.name or "").partition(".")[0]
    if library not in _EXTRA_OF:
        return error
    extra = _EXTRA_OF_COMMAND.get(command, _EXTRA_OF[library])
    if extra == "torch":
        extra = _TORCH_OF_COMMAND.get(command, extra)
    return MissingExtraError(library, extra, f"`titan-ckpt {command}`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every error becomes its text on stderr and an exit code (docs/design.md)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is not None:
        return _exit_code(arguments, is_program=False)
    if "_ARGCOMPLETE" in os.environ:
        from titan_ckpt.cli.completion import complete

        complete(build_parser, COMMANDS)
    open_closed_streams()
    try:
        code = _exit_code(arguments, is_program=True)
    finally:
        drop_unwritten()
    end_beside_threads(code)
    return code


def _exit_code(arguments: Sequence[str], *, is_program: bool) -> int:
    words = _in_order(arguments)
    with events_on_stderr("--progress=json" in words):
        return _reported(words, is_program=is_program)


def _reported(arguments: Sequence[str], *, is_program: bool) -> int:
    show_traceback = "--traceback" in arguments
    in_threads: list[BaseException] = []
    try:
        with nothing_printed_elsewhere(in_threads):
            code = _run(arguments, is_program=is_program)
            for error in in_threads:
                code = report_failure(error, arguments, show_traceback=show_traceback)
            flush()
        return code
    except ParserExit:
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    except OutputClosedError:
        return OUTPUT_CLOSED
    except BaseException as error:  # noqa: BLE001  (a SystemExit, too: only the parser may end the program)
        return report_failure(error, arguments, show_traceback=show_traceback)


def _run(arguments: Sequence[str], *, is_program: bool) -> int:
    stores, arguments = split_store_arguments(arguments)
    name = _command(arguments)
    check_urls(arguments)
    try:
        namespace = build_parser(only=name).parse_args(arguments)
        if namespace.verbose:
            logging.getLogger().setLevel(logging.INFO)
        # ranks that a launcher started end as it tells them to; training later has handlers of its own
        if is_program and not (name == "train" and "WORLD_SIZE" in os.environ):
            signal.signal(signal.SIGTERM, _interrupt)
        if namespace.quiet:
            logging.getLogger().setLevel(logging.ERROR)
        with settings_of_command(_settings(stores, arguments, name)), quiet(namespace.quiet):
            return int(namespace.run(namespace))
    except ParserExit as ended:
        if ended.wrong and "--json" in arguments:
            write_json_error(UsageError.__name__, ended.wrong, UsageError.exit_code)
        flush()  # `--help` that cannot be written is an error, too
        raise
    except ModuleNotFoundError as error:
        raise missing_extra(error, name) from error


_ALONE = ("-h", "--help", "--version", "--json", "--progress=json", "--progress=auto")
_FLAGS = ("-v", "--verbose", "-q", "--quiet", "--traceback")


def _in_order(arguments: Sequence[str]) -> list[str]:
    """The arguments with the flags of `titan-ckpt` itself in front, wherever they stood, and `--json` after the command."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    given, rest = iter(arguments[:end]), list(arguments[end:])
    flags, words = [], []
    for word in given:
        if word == "--progress":
            flags.append(f"{word}={next(given, '')}")
        elif word in _FLAGS or word.startswith("--progress="):
            flags.append(word)
        else:
            words.append(word)
    if words[:1] == ["--json"]:
        words = [*words[1:], "--json"]
    return [*flags, *words, *rest]


def _command(arguments: Sequence[str]) -> str:
    """The name of the command; "" if none is given. UsageError for a word that is none."""
    word = next((word for word in arguments if not word.startswith("-")), "")
    if not word and (unknown := [option for option in arguments if option not in (*_ALONE, *_FLAGS)]):
        raise UsageError(f"no option {unknown[0]!r}; a command comes first: titan-ckpt --help lists them")
    if word and word not in COMMANDS:
        raise UsageError(f"no command {word!r}; {nearest(word, COMMANDS)}titan-ckpt --help lists them")
    return word


def _settings(stores: argparse.Namespace, arguments: Sequence[str], command: str) -> StoreSettings:
    """What the command's stores are opened with. UsageError if it is given and no argument is the URL of a store."""
    settings = StoreSettings(
        options=store_options(stores),
        client="auto" if stores.client is None else stores.client,
        words=store_words(stores),
    )
    check_word(settings.client, CLIENTS, "--client")
    is_elsewhere = command in ("train", "tui")  # the URLs are in a config, or chosen on the screen
    if settings.words and not is_elsewhere and all(scheme(word) == "file" for word in arguments):
        raise UsageError(
            f"{settings.words[0].partition('=')[0]}: no argument is the URL of a store; local folders have no options"
        )
    return settings


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """What a scheduler stops is cleaned up like what Ctrl-C stops, also where SIGINT is ignored (`nohup`, `&` in a script)."""
    raise KeyboardInterrupt
