"""Configs that come with the package, named without a path: `titan-ckpt train tiny`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from titan_ckpt import version
from titan_ckpt.arguments import nearest
from titan_ckpt.errors import ConfigError

FOLDER = Path(version.__file__).parent / "configs"


def recipes() -> dict[str, Path]:
    """The file of each recipe, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def templates() -> dict[str, Path]:
    """The files that `init` starts from: the recipes, and those for fine-tuning, whose model and data are to be filled in."""
    tuning = {path.stem: path for path in sorted((FOLDER / "tuning").glob("*.toml"))}
    return dict(sorted((recipes() | tuning).items()))


def published() -> dict[str, Path]:
    """The files of the configs of published results, by name, such as `torchtitan/8b_8/float8`."""
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.glob("*/*/*.toml"))}


def _listed(known: Mapping[str, Path]) -> str:
    """The names of `known`, and an example of the published ones, which are too many."""
    rows = published()
    return f"{', '.join(known)}, and {len(rows)} published rows such as {next(iter(rows))} (`titan-ckpt init --list`)"


def purpose(path: Path) -> str:
    """What a recipe is for: the comment in its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def find_template(name: str) -> Path:
    """The file of template `name`, as `find_recipe`."""
    known = templates() | published()
    return known[name] if name in known else find_recipe(name, templates())


def is_template(name: str) -> bool:
    """Whether `init --template NAME` finds one."""
    return name in published() or len(_named(name, templates())) == 1


def find_recipe(name: str, known: Mapping[str, Path] | None = None) -> Path:
    """The file of recipe `name`, or of the only one whose name ends with it (`8b` is llama3_8b). ConfigError if there is none."""
    known = recipes() if known is None else known
    found = _named(name, known)
    if len(found) != 1:
        raise ConfigError(f"no recipe {name!r}; {nearest(name, {**known, **published()})}there are {_listed(known)}")
    return found[0]


def _named(name: str, known: Mapping[str, Path]) -> list[Path]:
    wanted = name.lower()
    exact = [path for stem, path in known.items() if wanted == stem]
    return exact or [path for stem, path in known.items() if stem.endswith(f"_{wanted}")]


def find_config(given: str) -> str:
    """The path of the config file `given`, or of the recipe of that name. ConfigError if there is neither."""
    if os.path.exists(given) and not os.path.isdir(given):
        return given
    if given in published():
        return str(published()[given])
    _refuse_other_kinds(given)
    is_name = os.path.basename(given) == given and not given.endswith(".toml")
    if is_name and given in templates().keys() - recipes().keys():
        raise ConfigError(
            f"{given} is a template whose model and data you fill in: `titan-ckpt init --template {given}`"
        )
    if is_name:
        return str(find_recipe(given))
    stem = os.path.basename(given).removesuffix(".toml")
    if stem in recipes():
        raise ConfigError(
            f"{given}: no such config file; the recipe that comes with the package is named {stem!r} alone"
        )
    hint = nearest(given.removesuffix(".toml"), published())
    raise ConfigError(
        f"{given}: no such config file; {hint}`titan-ckpt init` writes one, and recipes have no path: {_listed(recipes())}"
    )


def _refuse_other_kinds(given: str) -> None:
    """ConfigError for a folder, a run or a URL in a config's place; a folder that is named like a recipe does no harm."""
    if "://" in given:
        raise ConfigError(f"{given}: a config is a local TOML file; copy it here first")
    if os.path.isdir(given) and not _named(given, recipes()):
        raise ConfigError(
            f"{given} is a folder: give a TOML file or a recipe; a run goes on with its config and --set save.url={given}"
        )


def recipe_of(origin: str) -> str:
    """`recipe NAME` for the path of a recipe; any other origin of a value unchanged."""
    path = Path(origin)
    return f"recipe {path.stem}" if path.parent == FOLDER else origin
