"""Every command with a right line, and wrong lines made from it: one word of each is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_ckpt.cli.main import build_parser
from titan_ckpt.console.command import Parser
from titan_ckpt.debug.cli import verb_parsers

# A right line of each command, in the folder that `campaign.make_folder` makes. None of them starts a job.
RIGHT: dict[str, list[str]] = {
    "init": ["new.toml"],
    "train": ["debug", "--print-config"],
    "eval": ["runs/tiny@1", "--config", "debug"],
    "config": [],
    "plot": ["runs/tiny"],
    "ls": ["runs/tiny"],
    "inspect": ["runs/tiny@1"],
    "verify": ["runs/tiny@1"],
    "diff": ["runs/tiny@1", "runs/tiny@2", "--values"],
    "reshard": ["runs/tiny@1", "out", "--mesh", "dp_shard=2", "-n"],
    "cp": ["runs/tiny@1", "out"],
    "prune": ["runs/tiny", "--keep-last", "1"],
    "convert to-hf": ["runs/tiny@1", "out", "-n"],
    "convert from-hf": ["model", "out", "-n"],
    "convert to-torch": ["runs/tiny@1", "out.pt"],
    "convert from-torch": ["afile", "out"],
    "debug": ["incident"],
    "debug collect": ["--pid", "1", "--out", "out"],
    "debug inject": ["skip", "--out", "out"],
    "debug watch": ["incident"],
    "tui": ["incident", "--screenshot", "out.svg"],
    "doctor": [],
    "demo": ["--dir", "afile"],
    "completion": ["bash"],
}
NOT_NUMBERS = ("two", "1.5.2", "", "1_0x", "10 MB")
WRONG_BY_TYPE: dict[str, tuple[str, ...]] = {
    "int": (*NOT_NUMBERS, "-3", "2.5", "1e3", "9" * 40),
    "float": (*NOT_NUMBERS, "-1", "nan", "inf", "1,5"),
    "parse_size": ("much", "5x", "-1GB", "", "nan", "1..5GB", "GB"),
    "parse_age": ("old", "5x", "-1h", "", "nan", "h"),
    "parse_screen_size": ("80", "80x", "axb", "0x0", "80x24x3", ""),
}
URLS = (
    "runs/tny", "s3//bucket/run", "s3:/bucket/run", "htp://host/run", "s3://", "afile", "empty", "", "runs/tiny@abc",
    "runs/tiny@-1", "runs/tiny@99", "runs/tiny@", "afile/below", "noread/run", "runs/tiny\0", "@1",
)  # fmt: skip
# Words of which some are right, by the place that the help gives them.
WRONG_BY_PLACE: dict[str, tuple[str, ...]] = {
    "--mesh": ("dp_shar=2", "dp_shard", "dp_shard=0", "dp_shard=two", "dp_shard=-1", "dp_shard=2,dp_shard=4", "", "tp=1.5", "2"),
    "--set": (
        "mesh.tp", "mesh.tpp=2", "mesh.tp=two", "mesh.tp=", "=2", "", "mesh=2", "tp=2", "mesh.tp.x=2", "train.steps=2.5",
        "optimizer.lr=fast", "save.url=3", "data.seq_len=true", "log.progress=1", "save.keep_last=-1", "train.steps=10 MB",
    ),
    "--storage-option": ("anon", "=true", "", "key=abc"),
    "--client": ("boto3", ""),
    "--template": ("tinny", ""),
    "--explain": ("mesh.tq", "", "save.urll"),
    "--show": ("nope.weight",),
    "--rename": ("nope", "", "="),
    "--include": ("nope.*",),
    "--dtype": ("float17", ""),
    "--placements": ("nope.toml", "afile", "empty"),
    "--module": ("nope.py", "afile", "empty"),
    "--config": ("nope.toml", "afile", "empty"),
    "--merge-lora": ("nope", "afile", "empty"),
    "--upload-rate": ("much", "5x", "", "0"),
    "config": ("nope.toml", "debugg", "afile", "empty", "binary", "", "noread"),
    "case": ("skp", ""),
    "glob": ("nope.*",),
    "file": ("afile", "afile/below.toml", "nofolder/x.toml", ""),
    "--output": ("afile", "afile/below.svg", "nofolder/x.svg"),
    "--html": ("afile", "afile/below", "nofolder/x.html"),
    "--perfetto": ("afile", "afile/below", "nofolder/x"),
    "--screenshot": ("afile", "afile/below.svg", "nofolder/x.svg"),
}  # fmt: skip
DESTINATIONS = ("s3//bucket/run", "htp://host/run", "s3://", "afile/below", "")
# What is right, or cannot be judged, of these: by command and place, or by place alone.
RIGHT_WORDS = {
    "--keep-last": ("9" * 40,),
    "--keep-every": ("9" * 40,),
    "--stages-per-rank": ("9" * 40,),
    "tui path": ("afile", "runs/tiny@99"),
    "tui --storage-option": ("key=abc",),
    "plot url": ("runs/tiny@99",),
    "plot --output": ("afile/below.svg", "nofolder/x.svg"),  # the run has no metrics, which is told first
    "reshard destination": ("afile/below",),  # `-n` writes nothing there
    "convert to-hf dst": DESTINATIONS,  # the run is no model, which is told first
    "convert from-hf dst": DESTINATIONS,
    "convert from-torch dst": DESTINATIONS,
    "--restarts": ("9" * 40,),
    "train --storage-option": ("key=abc",),  # the URL may be in the config
    "doctor urls": URLS,  # findings, with exit code 1
    "debug collect folder": URLS,  # not together with --pid, which is told first
    "debug path": ("afile", "empty"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongLine:
    """A command line; the answer must name what is wrong with it, or the option that this was given to."""

    words: tuple[str, ...]
    wrong: str
    option: str = ""


def commands() -> dict[str, Parser]:
    """The parser of every command that does something."""
    found = dict(_leaves(build_parser(), ""))
    return found | {parser.prog.removeprefix("titan-ckpt "): parser for parser in verb_parsers()}


def _leaves(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, Parser]]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for child, parsed in action.choices.items():
            yield from _leaves(parsed, f"{name} {child}".strip())
    if not inner:
        assert isinstance(parser, Parser)
        yield name, parser


def wrong_lines(name: str, parser: Parser) -> Iterator[WrongLine]:
    """Every wrong line of a command."""
    start, right = name.split(), RIGHT[name]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            yield from _wrong_options(name, right, action)
        else:
            yield from _wrong_positionals(name, right, parser, action)
    yield from lines_without_effect(name, parser)
    yield WrongLine(words=(*start, *right, "--nosuch"), wrong="--nosuch")
    if not any(action.nargs in ("*", "...") for action in parser._actions):
        yield WrongLine(words=(*start, *right, "one", "more", "extra"), wrong="extra")


def lines_without_effect(name: str, parser: Parser) -> Iterator[WrongLine]:
    """For each rule of the parser a line with an option that would do nothing: alone, or beside one that it does not go with."""
    mentioned = {option for rule in parser.rules for option in (rule.option, *rule.needed, *rule.excluded)}
    words = [*name.split(), *_without_all(RIGHT[name], parser, mentioned)]
    for rule in parser.rules:
        if rule.needed:
            yield WrongLine(words=(*words, _given(parser, rule.option)), wrong=rule.option)
        for other in rule.excluded:
            if other.startswith("-"):
                yield WrongLine(words=(*words, _given(parser, rule.option), _given(parser, other)), wrong=rule.option)


def _without_all(words: list[str], parser: Parser, options: set[str]) -> list[str]:
    """The words less these options, by whatever name, and their values."""
    found, given = [], iter(words)
    for word in given:
        action = parser._option_string_actions.get(word)
        if action is None or action.option_strings[-1] not in options:
            found.append(word)
        elif action.nargs != 0:
            next(given)
    return found


def _given(parser: Parser, option: str) -> str:
    """The option with a value that it takes."""
    action = parser._option_string_actions[option]
    if action.nargs == 0:
        return option
    values = {"parse_age": "2d", "parse_screen_size": "80x24"}
    return f"{option}={next(iter(action.choices)) if action.choices else values.get(_kind(action), '1')}"


def _kind(action: argparse.Action) -> str:
    return getattr(action.type, "__name__", "")


def _wrong_options(name: str, right: list[str], action: argparse.Action) -> Iterator[WrongLine]:
    start, option = name.split(), action.option_strings[-1]
    takes_value = action.nargs != 0
    value = ("1",) if takes_value else ()
    misspelt = option[:-1] + option[-2:][::-1] if option.startswith("--") else option + "q"
    yield WrongLine(words=(*start, *right, misspelt, *value), wrong=misspelt)
    if not takes_value:
        yield WrongLine(words=(*start, *right, f"{option}=yes"), wrong=option if option.startswith("--") else "=yes")
        return
    yield WrongLine(words=(*start, *right, option), wrong=option)
    for word in wrong_words(name, action):
        yield WrongLine(words=(*start, *_without(right, option), f"{option}={word}"), wrong=word, option=option)


def _without(words: Sequence[str], option: str) -> list[str]:
    """The words less an option and its value."""
    at = words.index(option) if option in words else len(words)
    return [*words[:at], *words[at + 2 :]]


def _wrong_positionals(name: str, right: list[str], parser: Parser, action: argparse.Action) -> Iterator[WrongLine]:
    start = name.split()
    places = [other for other in parser._actions if not other.option_strings and other.help != argparse.SUPPRESS]
    place = places.index(action)
    first_option = next((at for at, word in enumerate(right) if word.startswith("-")), len(right))
    given, rest = right[:first_option], right[first_option:]
    if action.nargs is None:
        yield WrongLine(words=(*start, *given[:place], *rest), wrong="")
    for word in wrong_words(name, action):
        yield WrongLine(words=(*start, *given[:place], word, *given[place + 1 :], *rest), wrong=word)


def wrong_words(name: str, action: argparse.Action) -> list[str]:
    """Words that this argument of command `name` must refuse."""
    places = [*action.option_strings, action.dest]
    right = {word for place in places for key in (place, f"{name} {place}") for word in RIGHT_WORDS.get(key, ())}
    return [word for word in _candidates(places, action) if word not in right]


def _candidates(places: list[str], action: argparse.Action) -> tuple[str, ...]:
    for place in places:
        if place in WRONG_BY_PLACE:
            return WRONG_BY_PLACE[place]
    if action.choices is not None:
        first = str(next(iter(action.choices)))
        return ("nope", first[:-1], f"{first}x", "")
    kind = _kind(action)
    if kind in WRONG_BY_TYPE:
        return WRONG_BY_TYPE[kind]
    if action.dest in ("destination", "dst"):
        return DESTINATIONS
    return URLS if not action.option_strings else ()
