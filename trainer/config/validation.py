"""The table `[validation]`: samples held out of the run's data, and corpora of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Format: TypeAlias = Literal["auto", "text", "jsonl", "parquet", "tar", "tokens", "nanogpt", "megatron", "chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSet:
    """A corpus of its own that is evaluated; it may be added to a run at any time."""

    name: str  # in logs and records
    url: str  # as of data.mixture
    format: Format = "auto"  # as of data.mixture
    text_field: str = "text"  # the key of the text in a JSONL line


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Samples that are never trained on. `every=0` switches validation off; `fraction` is held out even then."""

    every: int = 0  # steps; 0: never
    fraction: float = 0.0  # of each source
    samples: int = 64  # per evaluation, at most
    sets: tuple[ValidationSet, ...] = ()  # corpora beside the held-out samples, each with a number of its own
