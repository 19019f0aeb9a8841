"""Compare logits of an exported folder with those of a model filled by the checkpoint's reader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.converters.hf.config import hf_config
from titan_ckpt.converters.hf.export_plan import ExportPlan, ExportTensor
from titan_ckpt.converters.models.tensor_names import LAYOUTS, MODEL_PREFIX, TITAN, name_in
from titan_ckpt.errors import DamagedError
from titan_ckpt.sharding.placement import Box

MAX_CONTEXT = 512
_THREADS = "TOKENIZERS_PARALLELISM"
_TALKERS = ("transformers", "torchao", "torch.utils._pytree")
"""Loggers that warn, at import and while loading, of what a user cannot mend: kernels for other devices, deprecations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitComparison:
    """Differences over `tokens` tokens of real text, in fp32. `kl`: mean KL(checkpoint || export) in nats. `first_layer`: the
    first that differs."""

    tokens: int
    max_abs_difference: float
    kl: float
    top1_agreement: float
    first_layer: str | None


def compare_logits(
    checkpoint: Checkpoint, plan: ExportPlan, folder: str, text: bytes, num_tokens: int
) -> LogitComparison:
    """Run both models on the same tokens of `text`, from the exported tokenizer or else bytes modulo the vocabulary size."""
    with _only_errors():
        exported = _load(folder)
        reference = _fill(checkpoint, plan)
        tokens_S = _tokens(folder, text, num_tokens, plan.spec.vocab_size)
        context = min(MAX_CONTEXT, plan.spec.max_seq_len)
        totals = _Totals()
        for tokens_1S in torch.split(tokens_S, context):
            totals.add(_run(reference, tokens_1S[None]), _run(exported, tokens_1S[None]))
    return totals.result()


@contextmanager
def _only_errors() -> Iterator[None]:
    """Silence the libraries' warnings and progress bars; levels are as they were afterwards."""
    loggers = [logging.getLogger(name) for name in _TALKERS]
    before = [logger.level for logger in loggers]
    bars: Any = transformers.utils.logging
    has_bar = bars.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if has_bar:
            bars.enable_progress_bar()


def _load(folder: str) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    try:
        return auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:  # any exception means that it does not load
        raise DamagedError(
            f"{folder}: every byte is as it was written, but transformers {transformers.__version__} does not load it: {error}"
        ) from error


def _fill(checkpoint: Checkpoint, plan: ExportPlan) -> Any:
    """Build a transformers model from the plan's config and read its parameters one by one from the checkpoint."""
    config = hf_config(plan.spec, base=None, dtype="float32")
    model_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(model_config, dtype=torch.float32)
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    parameters = dict(model.named_parameters()) | buffers
    filled = set()
    with torch.no_grad():
        for tensor in plan.tensors:
            named = name_in(LAYOUTS[TITAN], tensor.named.hf, plan.spec)
            name = named.ours.removeprefix(MODEL_PREFIX)
            if name in parameters:
                place = tuple(map(slice, *_bounds(named.stacked.box))) if named.stacked else ()
                parameters[name][place].copy_(_read(checkpoint, tensor, plan))
                filled.add(name)
    if filled < set(parameters):
        lost = ", ".join(sorted(set(parameters) - filled))
        raise DamagedError(f"{checkpoint}: transformers' model also has {lost}")
    return model.eval()


def _bounds(box: Box) -> tuple[list[int], list[int]]:
    return list(box.offsets), [offset + size for offset, size in zip(box.offsets, box.sizes, strict=True)]


def _read(checkpoint: Checkpoint, tensor: ExportTensor, plan: ExportPlan) -> Tensor:
    value = checkpoint.read(tensor.entry.fqn, tensor.box)
    if tensor.named.transform:
        half = plan.spec.head_dim // 2
        value = value.reshape(-1, half, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if plan.adapter is not None and tensor.named.hf in plan.adapter.factors:
        value = plan.adapter.merged(tensor.named.hf, value, Box.whole(tensor.entry.global_shape))
    return value.to(getattr(torch, tensor.dtype))


def _tokens(folder: str, text: bytes, num_tokens: int, vocab_size: int) -> Tensor:
    if Path(folder, "tokenizer.json").exists() or Path(folder, "tokenizer.model").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with _one_thread():
            ids: Sequence[int] = tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"]
    else:
        ids = [byte % vocab_size for byte in text]
    if len(ids) < num_tokens or max(ids[:num_tokens]) >= vocab_size:
        raise DamagedError(
            f"{folder}: the tokenizer gives {len(ids)} tokens up to {max(ids)} for a vocabulary of {vocab_size}"
        )
    return torch.tensor(ids[:num_tokens], device="cpu")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps tokenizers from starting threads, unless the environment says otherwise: they do not survive a fork."""
    is_ours = _THREADS not in os.environ
    os.environ.setdefault(_THREADS, "false")
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_THREADS]


@torch.no_grad()
def _run(model: Any, tokens_BS: Tensor) -> tuple[list[Tensor], Tensor]:
    """The hidden state after the embedding and after every layer, and the logits."""
    output = model(tokens_BS, output_hidden_states=True, use_cache=False)
    return list(output.hidden_states), output.logits


class _Totals:
    """Totals over windows of tokens."""

    def __init__(self) -> None:
        self._tokens = 0
        self._largest, self._kl, self._same = 0.0, 0.0, 0
        self._first: int | None = None
        self._layers = 0

    def add(self, ours: tuple[list[Tensor], Tensor], theirs: tuple[list[Tensor], Tensor]) -> None:
        """Add a window: hidden states and logits of both models."""
        (hidden, logits_BSV), (other_hidden, other_BSV) = ours, theirs
        self._tokens += logits_BSV.shape[1]
        self._layers = len(hidden)
        self._largest = max(self._largest, float(_distance(logits_BSV, other_BSV).max()))
        log_p_BSV, log_q_BSV = logits_BSV.double().log_softmax(-1), other_BSV.double().log_softmax(-1)
        self._kl += float((log_p_BSV.exp() * (log_p_BSV - log_q_BSV)).nan_to_num(0.0).sum())
        self._same += int((logits_BSV.argmax(-1) == other_BSV.argmax(-1)).sum())
        different = [n for n, (a, b) in enumerate(zip(hidden, other_hidden, strict=True)) if _distance(a, b).any()]
        if different:
            self._first = min(different[0], self._layers if self._first is None else self._first)

    def result(self) -> LogitComparison:
        """The comparison over all windows."""
        return LogitComparison(
            tokens=self._tokens,
            max_abs_difference=self._largest,
            kl=self._kl / max(1, self._tokens),
            top1_agreement=self._same / max(1, self._tokens),
            first_layer=_layer_name(self._first, self._layers) if self._first is not None else self._head(),
        )

    def _head(self) -> str | None:
        return "lm_head" if self._largest > 0 else None


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|: 0 where both are the same infinity or NaN, infinite where only one is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)


def _layer_name(hidden: int, num_hidden: int) -> str:
    """The module that produced hidden state number `hidden`; the last one includes the final norm."""
    if hidden == 0:
        return "model.embed_tokens"
    return f"model.layers.{hidden - 1}" + (" or model.norm" if hidden == num_hidden - 1 else "")
