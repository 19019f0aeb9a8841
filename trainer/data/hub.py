"""Documents of a Hugging Face dataset, read with the `datasets` library (an extra): `datasets:NAME`, or a saved folder.

`datasets:allenai/c4?config=en&split=train` is downloaded; `datasets:/data/books` was written by `save_to_disk`, or is a folder of
data files. A stream does not load the split: it reads the split's data files, one after the other, where they lie.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

from titan_ckpt.errors import DataError, MissingExtraError

PREFIX = "datasets:"
STREAMED: dict[str, Literal["jsonl", "parquet", "tar"]] = {"json": "jsonl", "parquet": "parquet", "webdataset": "tar"}


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
    name, config, split = _asked(url)
    rows = _call(url, lambda library: _load(library, name, config, split))
    path = url.removeprefix(PREFIX)
    return HubSplit(path=path, size_bytes=int(rows.data.nbytes), version=str(rows._fingerprint), rows=rows)


def data_files(url: str) -> tuple[Literal["jsonl", "parquet", "tar"], list[str]]:
    """What the data files of the split that `url` names are, and their URLs, sorted; nothing of them is read.

    DataError for a part of a split, and for a dataset that is not made of JSON lines, Parquet or tar shards.
    """
    name, config, split = _asked(url)
    if _is_saved(name):
        raise DataError(
            f"{url}: a folder of save_to_disk has no shards to stream; write it with to_parquet, or set data.stream = false"
        )
    builder = _call(url, lambda library: library.load_dataset_builder(name, config))
    kind = STREAMED.get(builder.name)
    if kind is None:
        raise DataError(
            f"{url}: made of {builder.name!r}; data.stream reads {', '.join(STREAMED)}. Set data.stream = false to load it"
        )
    found = builder.config.data_files or {}
    if split not in found:
        raise DataError(f"{url}: no split {split!r} to stream; whole splits are {', '.join(map(str, found))}")
    return kind, sorted(str(file) for file in found[split])


def _asked(url: str) -> tuple[str, str | None, str]:
    """Dataset, config and split; DataError for other options."""
    name, _, query = url.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    config, split = options.pop("config", None), options.pop("split", "train")
    if options:
        raise DataError(f"{url}: unknown options {', '.join(options)}; known: config, split")
    return name, config, split


def _call(url: str, load: Callable[[Any], Any]) -> Any:
    try:
        import datasets  # an extra
    except ImportError as error:
        raise MissingExtraError("datasets", "datasets", f"data.source = {url!r}") from error
    try:
        return load(datasets)
    except Exception as error:  # the library's errors have no common base class
        raise DataError(f"{url}: datasets could not open it: {type(error).__name__}: {error}") from error


def _load(datasets: Any, name: str, config: str | None, split: str) -> Any:
    if not _is_saved(name):
        return datasets.load_dataset(name, config, split=split)
    saved = datasets.load_from_disk(name)
    return saved[split] if isinstance(saved, datasets.DatasetDict) else saved


def _is_saved(name: str) -> bool:
    """Whether it is a folder that `save_to_disk` wrote."""
    return any(os.path.isfile(os.path.join(name, file)) for file in ("state.json", "dataset_dict.json"))
