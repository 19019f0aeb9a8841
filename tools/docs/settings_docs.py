"""Generate docs/settings.md from the records of the config."""

from __future__ import annotations

from titan_ckpt.trainer.config.settings import Setting, tables

HEAD = """\
# Settings of `titan-ckpt train`

Written by `make docs` from the records of the config. `titan-ckpt init` writes a config file with all of them,
`titan-ckpt config --explain NAME` explains one, and `titan-ckpt config --schema` prints a JSON Schema with which editors complete
and check the file.

All settings are there since 0.1.0, the first release.

A file may name another as its `base`, which is read first. `--set table.key=value` overrides both.
"""


def reference() -> str:
    """The whole page."""
    sections = [HEAD]
    for table in tables():
        rows = [_row(setting) for setting in table.settings]
        head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
        sections.append("\n".join([f"## `[{table.name}]`\n\n{table.meaning}\n", *head, *rows, ""]))
    return "\n".join(sections)


def _row(setting: Setting) -> str:
    default = "must be set" if setting.default is None else f"`{setting.default}`" if setting.default else "not set"
    return f"| `{setting.name}` | {_cell(setting.type)} | {_cell(default)} | {_cell(setting.meaning)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
