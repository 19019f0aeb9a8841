"""`--storage-option`, `--client` and the like, which every command takes; they may stand anywhere in its arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from titan_ckpt.arguments import text_of_file
from titan_ckpt.console.command import Parser
from titan_ckpt.errors import UsageError
from titan_ckpt.location import is_credential, redact_text
from titan_ckpt.secret_names import is_secret_name

# Option: (the storage option that it is short for, its metavar, its help).
_SHORT = {
    "--endpoint-url": ("endpoint_url", "URL", "server of s3:// (default: AWS_ENDPOINT_URL)"),
    "--profile": ("profile", "NAME", "profile in ~/.aws (default: AWS_PROFILE)"),
    "--region": ("region", "NAME", "region of s3:// (default: AWS_REGION)"),
}
MAX_SECRET_BYTES = 1 << 20
_SEEN = "every user of this machine sees secrets on a command line (ps)"


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments, as a group of their own."""
    group = parser.add_argument_group("stores")
    group.add_argument(
        "--storage-option", action="append", default=[], metavar="K=V",
        help="option of the fsspec file system, such as anon=true; a secret as secret=@FILE or secret=env:NAME; repeatable",
    )  # fmt: skip
    group.add_argument("--client", metavar="NAME", help="for s3://: botocore, s3fs or auto (default)")
    for option, (_, metavar, text) in _SHORT.items():
        group.add_argument(option, metavar=metavar, help=text)


def split_store_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The store arguments among `words`, and the other words."""
    parser = Parser(prog="titan-ckpt", add_help=False, allow_abbrev=False)
    add_store_arguments(parser)
    found, others = parser.parse_known_args(words)
    return found, others


def store_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The storage options that the arguments name. UsageError for a secret on the command line, where every user sees it."""
    options: dict[str, Any] = {}
    for word in namespace.storage_option:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--storage-option {name[:60]!r}: write it as NAME=VALUE")
        if name in options:
            raise UsageError(f"--storage-option {name}: given twice")
        options[name] = _value(name, value)
    for option, (name, _, _) in _SHORT.items():
        value = getattr(namespace, option.removeprefix("--").replace("-", "_"))
        check_urls([value or ""])
        if value is not None and options.setdefault(name, value) != value:
            raise UsageError(f"{option} and --storage-option {name} differ; give one")
    return options


def store_words(namespace: argparse.Namespace) -> tuple[str, ...]:
    """The arguments as words again, for the processes that a command starts."""
    words = [f"--storage-option={word}" for word in namespace.storage_option]
    for option in ("--client", *_SHORT):
        value = getattr(namespace, option.removeprefix("--").replace("-", "_"))
        words += [] if value is None else [f"{option}={value}"]
    return tuple(words)


def _value(name: str, text: str) -> Any:
    if text.startswith("@"):
        return _content(name, text[1:])
    if text.startswith("env:"):
        if text[4:] not in os.environ:
            raise UsageError(f"--storage-option: the environment has no {text[4:]}, which is to hold {name}")
        return os.environ[text[4:]]
    words = _quoted(text)
    if is_secret_name(name) or any(is_secret_name(word) or is_credential(word) for word in (text, *words)):
        raise UsageError(
            f"--storage-option: {_SEEN}. Give @FILE or env:VARIABLE as the value of {name}, or use a profile, the environment, "
            "or ~/.config/fsspec"
        )
    return text


def check_urls(words: Sequence[str]) -> None:
    """UsageError for a URL among the arguments that holds a password or a signature."""
    for word in words:
        if any(is_credential(part) for part in (word, word.partition("=")[2])):
            raise UsageError(
                f"{redact_text(word)[:200]}: {_SEEN}, and this URL holds one. Leave it out, and give it as an option "
                "(--storage-option NAME=@FILE), or use a profile, the environment, or ~/.config/fsspec"
            )


def _content(name: str, path: str) -> str:
    try:
        return text_of_file(os.path.expanduser(path), MAX_SECRET_BYTES).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--storage-option: cannot read {path} ({type(error).__name__}), which is to hold {name}"
        ) from error


def _quoted(text: str) -> list[str]:
    """What may be the names and values of a JSON mapping."""
    return [part.strip(" {\t\n") for part in text.split('"') if part.strip()] if text.lstrip().startswith("{") else []
