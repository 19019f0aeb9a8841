"""A config file for people to edit: what the recipe sets, and every other setting with its default as a comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titan_ckpt.trainer.config.recipes import purpose
from titan_ckpt.trainer.config.settings import Setting, Table, tables
from titan_ckpt.trainer.config.toml_records import read_file, toml_value

WIDTH = 44  # columns before the meaning


def starter(recipe: Path) -> str:
    """The text of a config that trains as `recipe` does, and saves to runs/NAME."""
    tree, _ = read_file(str(recipe))
    tree.setdefault("save", {}).setdefault("url", f"runs/{recipe.stem}")
    lines = [
        f"# {purpose(recipe)}",
        f"# titan-ckpt train {recipe.stem}.toml; --set table.key=value overrides a line for one run.",
        "# Lines with a # in front show the default.",
    ]
    for table in tables():
        lines += ["", *_table(table, tree.get(table.name, {}))]
    return "\n".join(lines) + "\n"


def _table(table: Table, given: dict[str, Any]) -> list[str]:
    own = [setting for setting in table.settings if setting.name.count(".") == 1]
    if "from" in given and table.name == "model":
        own = [setting for setting in own if setting.name.partition(".")[2] in given]  # it gives the others
    return [f"# {table.meaning}", f"[{table.name}]", *(_line(setting, given) for setting in own)]


def _line(setting: Setting, given: dict[str, Any]) -> str:
    key = setting.name.partition(".")[2]
    if key in given:
        text = f"{key} = {toml_value(given[key])}"
    else:
        text = f"# {key} = {setting.default}".rstrip()
    return f"{text:<{WIDTH}}  # {setting.meaning}"
