"""Documents of a Hugging Face dataset, read with the `datasets` library (an extra): `datasets:NAME`, or a saved folder.

`datasets:allenai/c4?config=en&split=train` is downloaded; `datasets:/data/books` was written by `save_to_disk`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from titan_ckpt.errors import DataError, MissingExtraError

PREFIX = "datasets:"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSplit:
    """One split of a dataset, read like a file. `version` is the library's fingerprint of its content."""

    path: str
    size_bytes: int
    version: str
    rows: Any

    @property
    def where(self) -> str:
        """Its full location, for messages."""
        return PREFIX + self.path

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows, in order."""
        yield from self.rows

    def documents(self, text_field: str) -> Iterator[bytes]:
        """The text of each row, in order; DataError for a row without text."""
        if text_field not in self.rows.column_names:
            found = ", ".join(self.rows.column_names)
            raise DataError(f"{self.where}: no column {text_field!r} (data.text_field); found {found}")
        for number, row in enumerate(self.rows.select_columns([text_field])):
            text = row[text_field]
            if not isinstance(text, str):
                raise DataError(
                    f"{self.where}: row {number}: {text_field!r} is {type(text).__name__}, expected a string"
                )
            yield text.encode(errors="replace")


def open_split(url: str) -> HubSplit:
    """Open the split that `url` names; options are `?config=` and `&split=` (default train)."""
    try:
        import datasets  # an extra
    except ImportError as error:
        raise MissingExtraError("datasets", "datasets", f"data.source = {url!r}") from error
    name, _, query = url.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    config, split = options.pop("config", None), options.pop("split", "train")
    if options:
        raise DataError(f"{url}: unknown options {', '.join(options)}; known: config, split")
    try:
        rows = _load(datasets, name, config, split)
    except Exception as error:  # the library's errors have no common base class
        raise DataError(f"{url}: datasets could not open it: {type(error).__name__}: {error}") from error
    return HubSplit(path=f"{name}?{query}", size_bytes=int(rows.data.nbytes), version=str(rows._fingerprint), rows=rows)


def _load(datasets: Any, name: str, config: str | None, split: str) -> Any:
    if not os.path.isdir(name):
        return datasets.load_dataset(name, config, split=split)
    saved = datasets.load_from_disk(name)
    return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
