"""Checks before any rank is started: missing files, unreachable stores, tokenizers that do not fit the model."""

from __future__ import annotations

import json

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.format.names import LOGS
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import may_be_tokens
from titan_ckpt.trainer.data.corpus import list_files
from titan_ckpt.trainer.data.token_files import is_tokens
from titan_ckpt.trainer.data.tokenizer import check_vocabulary, open_tokenizer


def preflight(config: TrainConfig) -> None:
    """Check every external input and output of the run; raises the first problem."""
    tokenizer = open_tokenizer(config.data.tokenizer, separator=config.data.separator)
    check_vocabulary(tokenizer, config.model.vocab_size)
    for source in config.data.sources:
        if source.format != "tokens" and not (may_be_tokens(source) and is_tokens(source.url)):
            list_files(source.url)
    if config.resume.from_:
        open_checkpoint(config.resume.from_)
    for url in config.save.tiers:
        leave_config(config, url)


def leave_config(config: TrainConfig, url: str) -> None:
    """Write the config to URL/logs/config.json, as a record of the run and to prove that the store is writable."""
    open_store(url).write(f"{LOGS}/config.json", [json.dumps(as_dict(config), indent=1).encode()])
