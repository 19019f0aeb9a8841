"""What each setting does to the result of a run, and what a resume says of one that has changed since the checkpoint.

EFFECTS classifies every field of every record of the config; a test compares it with the records. "The result" is the sequence of
losses and weights, up to the order in which sums are taken (docs/design.md): the mesh and the methods change that order alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import ConfigError

log = logging.getLogger(__name__)


class Effect(Enum):
    """What a changed setting means for a resumed run."""

    SAME = "the result is the same"
    SAID = "the result changes, as it may be meant to: said in the log"
    REFUSED = "the saved state would mean something else: refused"
    MODEL = "another model: refused by `check_model`"
    DATA = "other samples or another order: refused by their fingerprint, unless resume.other_data"


def _each(effect: Effect, table: str, keys: str) -> dict[str, Effect]:
    return {f"{table}.{key}": effect for key in keys.split()}


EFFECTS: dict[str, Effect] = {
    **_each(Effect.MODEL, "model", "vocab_size dim n_layers n_heads n_kv_heads ffn_dim head_dim norm_eps rope_theta"),
    **_each(
        Effect.MODEL, "model", "rope_scaling tied_embeddings qkv_bias o_bias qk_norm sliding_window family experts"
    ),
    **_each(Effect.MODEL, "model", "full_attention_every sinks latent ahead"),
    **_each(Effect.MODEL, "model.latent", "kv_rank q_rank nope_dim rope_dim value_dim"),
    **_each(Effect.MODEL, "model.rope_scaling", "kind factor original_max_seq_len low_freq_factor high_freq_factor"),
    **_each(Effect.MODEL, "model.rope_scaling", "beta_fast beta_slow attention_factor truncate mscale mscale_all_dim"),
    **_each(Effect.MODEL, "model.experts", "number per_token ffn_dim norm_topk_prob scores correction_bias groups"),
    **_each(Effect.MODEL, "model.experts", "groups_per_token group_best scale shared dense_layers limit alpha"),
    **_each(Effect.MODEL, "model.ahead", "depth"),
    **_each(Effect.SAID, "model.ahead", "weight"),
    **_each(Effect.SAID, "experts", "bias_rate balance_loss z_loss"),
    **_each(Effect.SAME, "model", "max_seq_len"),  # positions are computed for the sequence at hand
    **_each(Effect.SAME, "mesh", "pp dp_replicate dp_shard cp tp ep etp pp_schedule pp_layers_per_stage microbatches"),
    **_each(Effect.SAME, "mesh", "sequence_parallel loss_parallel async_tp cp_method attention reshard_after_forward"),
    **_each(Effect.SAME, "mesh", "cpu_offload activation_checkpoint checkpoint_every_n activation_memory_budget"),
    **_each(Effect.SAME, "mesh", "loss_chunk_tokens compile"),
    **_each(Effect.SAID, "mesh", "param_dtype experts_dtype reduce_dtype float8 float8_all_gather float8_skip"),
    **_each(Effect.DATA, "chat", "template train_on too_long pack date"),
    **_each(Effect.DATA, "data", "source format mixture stream seq_len tokenizer separator shuffle bad_line"),
    **_each(Effect.DATA, "data.mixture", "url weight format text_field"),
    **_each(Effect.SAID, "data", "document_masks"),
    **_each(Effect.SAME, "data", "cache prefetch"),
    **_each(Effect.REFUSED, "optimizer", "name moments"),
    **_each(Effect.SAID, "optimizer", "momentum nesterov muon_iterations muon_dtype muon_scale ema_decay"),
    **_each(Effect.SAME, "optimizer", "implementation in_backward"),
    **_each(Effect.SAID, "optimizer", "lr betas eps weight_decay grad_clip warmup_steps schedule decay_fraction"),
    **_each(Effect.SAID, "optimizer", "min_lr_ratio not_finite max_skipped groups"),
    **_each(Effect.SAID, "optimizer.groups", "weights lr weight_decay name"),
    **_each(Effect.DATA, "train", "seed"),
    **_each(Effect.SAID, "train", "steps global_batch_size batch_ramp freeze"),
    **_each(Effect.SAME, "train", "microbatch_size max_seconds device deterministic gc_every init_timeout_s"),
    **_each(Effect.SAME, "train", "step_timeout_s"),
    **_each(Effect.REFUSED, "lora", "rank alpha targets base"),
    **_each(Effect.DATA, "validation", "fraction"),
    **_each(Effect.SAME, "validation", "every samples sets"),
    **_each(Effect.SAME, "validation.sets", "name url format text_field"),
    **_each(Effect.SAME, "save", "url mirror every at_end keep_last keep_every codec incremental timeout_s grace_s"),
    **_each(Effect.SAME, "save", "compile_cache upload_bytes_per_s upload_process"),
    **_each(Effect.SAME, "export", "every url dtype"),
    **_each(
        Effect.SAME, "resume", "auto from model_only other_data check_losses"
    ),  # `load_base` compares the base of adapters
    **_each(Effect.SAME, "log", "folder every progress tensorboard wandb trace_steps profile_steps memory_steps"),
    **_each(Effect.SAME, "log", "profile_every profile_active profile_warmup memory_dump"),
    **_each(Effect.SAME, "debug", "recorder stall_s"),
}

_NEWER = {"lora.base": "float32"}  # what a setting was in checkpoints of before it
_TABLES = frozenset(name.partition(".")[0] for name in EFFECTS)  # all others are an extension's


def check_settings(checkpoint: Checkpoint, config: Mapping[str, Any], *, is_own: bool) -> list[str]:
    """Compare the settings of the run that saved `checkpoint` with `config`; logs and returns those that change the result.

    ConfigError for settings without which the saved state means something else, if the run goes on (`is_own`).
    """
    before = checkpoint.manifest.config
    refused = _changes(before, config, Effect.REFUSED) if is_own else []
    if refused:
        raise ConfigError(
            f"{checkpoint} was saved by a run with other settings: {', '.join(refused)}; set them back, or start a run of its "
            "own (another save.url)"
        )
    if said := _changes(before, config, Effect.SAID):
        log.warning("changed since the checkpoint: %s", ", ".join(said))
    return said


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], effect: Effect) -> list[str]:
    """Settings of this effect in both configs that differ, as `table.key: before -> now`."""
    changes = []
    own = [f"{table}.{key}" for table, keys in now.items() if table not in _TABLES for key in keys]
    for name in [name for name, of in EFFECTS.items() if of == effect] + (own if effect is Effect.SAID else []):
        table, _, key = name.rpartition(".")
        then, since = _table(before, table), _table(now, table)
        if (
            not isinstance(then, Mapping)
            or not isinstance(since, Mapping)
            or (table == "lora" and _is_off(then, since))
        ):
            continue
        before_it = then.get(key, _NEWER.get(name))
        if before_it is not None and key in since and before_it != since[key]:
            changes.append(f"{name}: {before_it} -> {since[key]}")
    return changes


def _table(config: Mapping[str, Any], name: str) -> Any:
    """The table of this dotted name, None if there is none."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is_off(*tables: Mapping[str, Any]) -> bool:
    """Whether no run has adapters, so that their settings mean nothing."""
    return not any(table.get("rank") for table in tables)
