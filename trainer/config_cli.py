"""`titan-ckpt config`: what can be set, and what each setting means."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from titan_ckpt.console.command import Command, Parser, add_json_flag
from titan_ckpt.console.output import format_table, write_json, write_text

if TYPE_CHECKING:
    from titan_ckpt.trainer.config.settings import Setting, Table

EPILOG = """\
examples:
  titan-ckpt config                              # every setting
  titan-ckpt config --explain mesh.tp
  titan-ckpt config --explain save               # one table
  titan-ckpt config --schema > titan-ckpt.json   # for editors that complete TOML
"""


def configure(parser: Parser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("--explain", metavar="NAME", help="one setting or table, such as mesh.tp or save")
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of a config file")
    add_json_flag(parser)
    parser.excludes("--explain", "--schema")


def run(arguments: Namespace) -> int:
    """Print the schema, one setting, one table or all of them."""
    from titan_ckpt.trainer.config.settings import explain, schema, tables  # needs torch, which `--help` does not

    if arguments.schema:
        write_json(schema())
        return 0
    found: Sequence[Setting | Table] = tables() if arguments.explain is None else [explain(arguments.explain)]
    if arguments.json:
        write_json([asdict(item) for item in found])
    else:
        write_text("\n\n".join(_shown(item) for item in found))
    return 0


def _shown(item: Setting | Table) -> str:
    from titan_ckpt.trainer.config.settings import Table

    if isinstance(item, Table):
        rows = [[setting.name, _default(setting), setting.meaning] for setting in item.settings]
        return f"[{item.name}] {item.meaning}\n" + format_table(["setting", "default", "meaning"], rows)
    return f"{item.name}: {item.meaning}\n  type     {item.type}\n  default  {_default(item)}"


def _default(setting: Setting) -> str:
    return "must be set" if setting.default is None else setting.default or "not set"


CONFIG = Command(configure=configure, run=run)
