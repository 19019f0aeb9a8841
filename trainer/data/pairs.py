"""Preference pairs of `[data]`, for a loss of one's own: `data = titan_ckpt.trainer.preference_pairs`."""

from __future__ import annotations

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import open_chat
from titan_ckpt.trainer.data.chat_source import PairSource
from titan_ckpt.trainer.data.tokenizer import open_tokenizer
from titan_ckpt.trainer.seams.data import DataSource


def preference_pairs(config: TrainConfig) -> DataSource:
    """The pairs at `data.source`: `tokens` and `labels` [2, data.seq_len], the chosen answer first, labels on the answers alone.

    Lines have `chosen` and `rejected`, and perhaps `prompt`, as messages or as text. DataError names a line that has not.
    """
    data = config.data
    if len(data.sources) != 1 or not data.sources[0].url:
        raise ConfigError("preference_pairs reads one source: set data.source")
    tokenizer = open_tokenizer(data.tokenizer, separator=data.separator)
    # Every rank may write: the content is the same, and a file appears whole or not at all.
    file = open_chat(data.sources[0], data, config.chat, tokenizer, is_writer=True, kind="pairs")
    return PairSource(file, seq_len=data.seq_len, too_long=config.chat.too_long, padding=tokenizer.separator)
