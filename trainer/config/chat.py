"""The table `[chat]`: how conversations become samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How conversations (sources with format "chat") become samples."""

    template: str = ""  # path or URL of a Jinja chat template; empty: that of data.tokenizer
    train_on: Literal["answers", "last"] = "answers"  # all messages of the assistant, or the last one alone
    too_long: Literal["stop", "skip", "cut_left", "cut_right"] = (
        "stop"  # conversations of more than data.seq_len tokens
    )
    pack: bool = True  # several conversations in a sample, which do not see each other; false: one, padded
    date: str = "2024-07-26"  # the day that templates are told, so that a resumed run reads the same text
