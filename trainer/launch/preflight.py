"""What can be refused before any rank is started: files not there, stores that do not answer, tokenizers that do not fit."""

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
    """Look at everything that the run will need from outside; raises the first thing that is wrong."""
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
    """Write the config to URL/logs/config.json: the run's record of what it was asked, and proof that the store takes writes."""
    open_store(url).write(f"{LOGS}/config.json", [json.dumps(as_dict(config), indent=1).encode()])
