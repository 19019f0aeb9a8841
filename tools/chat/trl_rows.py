"""What TRL's trainers make of conversations and pairs, as the loss sees it: each token with the label of what follows it.

TRL's own trainers prepare the data and collate it; a model of a few weights is all they get beside. The data come as an iterable
of Python objects, since Arrow would fill up tools of different keys with nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

IGNORED = -100
BATCH = 8
Piece: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # ids, labels of what follows, positions


def answers(records: Sequence[dict[str, Any]], tokenizer: Any, folder: Path, *, only_answers: bool) -> list[Piece]:
    """Rows of `SFTTrainer`, collated: with `assistant_only_loss`, or of prompts and completions."""
    trainer = _sft(records, tokenizer, folder, assistant_only_loss=only_answers, max_length=None)
    return [piece for batch in _batches(trainer) for piece in _padded(batch["input_ids"], batch["labels"], batch)]


def packed(records: Sequence[dict[str, Any]], tokenizer: Any, folder: Path, seq_len: int) -> list[list[Piece]]:
    """Rows packed by best fit, as the collator without padding flattens them: the pieces of each."""
    trainer = _sft(records, tokenizer, folder, assistant_only_loss=True, max_length=seq_len, packing=True)
    return [_flattened(trainer.data_collator([row])) for row in trainer.train_dataset]


def pairs(records: Sequence[dict[str, Any]], tokenizer: Any, folder: Path) -> list[tuple[Piece, Piece]]:
    """Rows of `DPOTrainer`, collated: the chosen and the rejected answer of each."""
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=_model(tokenizer), ref_model=_model(tokenizer), args=_config(DPOConfig, folder, max_length=None),
        train_dataset=_iterable(records), processing_class=tokenizer,
    )  # fmt: skip
    found: list[tuple[Piece, Piece]] = []
    for batch in _batches(trainer):
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        rows = _padded(batch["input_ids"], labels, batch)
        found += zip(rows[: len(rows) // 2], rows[len(rows) // 2 :], strict=True)
    return found


def _sft(records: Sequence[dict[str, Any]], tokenizer: Any, folder: Path, **settings: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=_model(tokenizer), args=_config(SFTConfig, folder, **settings),
        train_dataset=_iterable(records), processing_class=tokenizer,
    )  # fmt: skip


def _config(kind: Any, folder: Path, **settings: Any) -> Any:
    return kind(output_dir=str(folder), max_steps=1, use_cpu=True, bf16=False, report_to=[], **settings)


def _model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1,
        )
    )  # fmt: skip


def _iterable(records: Sequence[dict[str, Any]]) -> Any:
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: iter(records))


def _batches(trainer: Any) -> Iterator[Any]:
    rows = list(trainer.train_dataset)
    for start in range(0, len(rows), BATCH):
        yield trainer.data_collator(rows[start : start + BATCH])


def _padded(ids_BS: Tensor, labels_BS: Tensor, batch: Any) -> list[Piece]:
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert all((row[length:] == IGNORED).all() for row, length in zip(labels_BS, lengths, strict=True))
    return [
        _piece(ids[:length], labels[:length], range(length))
        for ids, labels, length in zip(ids_BS, labels_BS, lengths, strict=True)
    ]


def _flattened(batch: Any) -> list[Piece]:
    """The pieces of one row; the label of each first token, which the end of the piece before would learn, must be IGNORED."""
    ids, labels, positions = (batch[name][0] for name in ("input_ids", "labels", "position_ids"))
    starts = (positions == 0).nonzero().flatten().tolist()
    assert (labels[starts] == IGNORED).all()
    bounds = zip(starts, [*starts[1:], len(ids)], strict=True)
    return [_piece(ids[start:end], labels[start:end], positions[start:end].tolist()) for start, end in bounds]


def _piece(ids: Tensor, labels: Tensor, positions: Sequence[int]) -> Piece:
    return tuple(ids.tolist()), (*labels[1:].tolist(), IGNORED), tuple(positions)
