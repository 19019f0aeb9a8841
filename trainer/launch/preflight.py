"""Checks before any rank is started: missing files, unreachable stores, tokenizers that do not fit the model."""

from __future__ import annotations

import json
import os

import torch

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.units import format_size
from titan_ckpt.errors import ConfigError
from titan_ckpt.format.names import LOGS, METADATA, parse_step
from titan_ckpt.store.base import Store, check_free
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.config.toml_records import as_dict
from titan_ckpt.trainer.config.train_config import TrainConfig
from titan_ckpt.trainer.data.batches import may_be_tokens
from titan_ckpt.trainer.data.binary_tokens import open_megatron
from titan_ckpt.trainer.data.chat_template import day, open_template
from titan_ckpt.trainer.data.corpus import list_files
from titan_ckpt.trainer.data.token_files import is_tokens
from titan_ckpt.trainer.data.tokenizer import check_vocabulary, open_tokenizer, tokenizer_folder
from titan_ckpt.trainer.model.attention import check_on_cpu
from titan_ckpt.trainer.model.lora import check_whole, kept_bytes
from titan_ckpt.trainer.model.plan import plan_of

OF_OTHERS = (
    *("model.safetensors", "model.safetensors.index.json", "adapter_config.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", METADATA),
)


def preflight(config: TrainConfig) -> None:
    """Check every external input and output of the run; raises the first problem."""
    check_memory(config)
    check_kernels(config)
    if config.log.memory_steps[1] and _is_on_cpu(config):
        raise ConfigError("log.memory_steps: snapshots are of an accelerator's memory; this run is on cpu")
    if config.extension.data is None:
        _check_corpora(config)
    if config.resume.from_:
        check_whole(open_checkpoint(config.resume.from_))
    stores = [open_store(url) for url in config.save.tiers]  # all are looked at before anything is written
    for store in stores:
        check_own(store)
        if not config.lora.rank:  # adapters are small
            check_free(
                store, lambda: int(kept_bytes(config.lora, plan_of(config.spec)))
            )  # a checkpoint's weights alone
    for store in stores:
        leave_config(config, store)


def check_kernels(config: TrainConfig) -> None:
    """ConfigError for kernels that this machine has not."""
    if _is_on_cpu(config):
        check_on_cpu(config.mesh.attention)


def _is_on_cpu(config: TrainConfig) -> bool:
    return config.train.device == "cpu" or not torch.cuda.is_available()


def _check_corpora(config: TrainConfig) -> None:
    tokenizer = open_tokenizer(config.data.tokenizer, separator=config.data.separator)
    if config.spec.vocab_size is not None:
        check_vocabulary(tokenizer, config.spec.vocab_size)
    if any(source.format == "chat" for source in config.data.sources):
        open_template(tokenizer_folder(config.data.tokenizer), config.chat.template, today=day(config.chat.date))
    for source in config.data.sources:
        if source.format == "megatron":
            open_megatron(source.url, tokenizer)
        elif source.format != "tokens" and not (may_be_tokens(source) and is_tokens(source.url)):
            list_files(source.url)


def check_memory(config: TrainConfig) -> None:
    """ConfigError if the weights alone, one copy over all ranks, are more than this machine's memory, on CPU."""
    if config.train.device == "cuda" or torch.accelerator.is_available():
        return
    needed = kept_bytes(config.lora, plan_of(config.spec))
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ConfigError(
            f"model: its weights take {format_size(needed)}, this machine has {format_size(there)} of memory; "
            "make model.dim, model.n_layers, model.ffn_dim or model.vocab_size smaller (--estimate shows what a mesh needs)"
        )


def check_own(store: Store) -> None:
    """ConfigError for a folder that holds a model or a checkpoint of another program, and no step of a run."""
    found = [name for name in OF_OTHERS if store.exists(name)]
    if found and not any(parse_step(name) is not None for name in store.folders()):
        raise ConfigError(
            f"save.url: {store} holds {found[0]} of another program and no run; give the run a folder of its own"
        )


def leave_config(config: TrainConfig, store: Store) -> None:
    """Write the config to logs/config.json, as a record of the run and to prove that the store is writable."""
    store.write(f"{LOGS}/config.json", [json.dumps(as_dict(config), indent=1).encode()])
