"""Compare ids, masks, packing and pairs with what TRL's trainers make: python -m tools.chat.with_trl [COUNT] [SEED].

TRL is installed for this alone, in `.trl/`. A token differs if its id, label or position does. Where the ids of a prompt change
because an answer follows (a tokenizer that joins spaces or line breaks), TRL learns from the first changed id on, and the trainer
from the first one with a character of the answer: those between are counted as the prompt's, and nothing else may differ.

Then the templates of real models that come with TRL, COUNT / 5 conversations of each.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from titan_ckpt.console.output import write_text
from titan_ckpt.trainer.config.chat import ChatConfig
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig
from titan_ckpt.trainer.data.batches import open_chat
from titan_ckpt.trainer.data.chat_source import ChatSource, PairSource
from titan_ckpt.trainer.data.chat_tokens import ChatFile, ChatKind
from titan_ckpt.trainer.data.packing import pack
from titan_ckpt.trainer.data.tokenizer import Tokenizer, open_tokenizer
from tools.chat import trl_rows
from tools.chat.compare import write_tokenizer
from tools.chat.conversations import conversation, text
from tools.chat.real_templates import compare_real
from tools.chat.templates import TEMPLATES, without_generation
from tools.chat.trl_rows import Piece
from tools.environment import environment_with
from tools.paths import ROOT

TRL = "trl==1.16.0"
WHOLE, PACKED = 1 << 15, 2048  # data.seq_len
PACKED_AT_ONCE = 1000  # conversations: TRL packs each thousand by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Examples and tokens compared, tokens that differ, and those of prompts that TRL alone learns, in how many examples."""

    examples: int
    tokens: int
    different: int
    of_prompts: int = 0
    changed: int = 0

    def __str__(self) -> str:
        more = f"; TRL learns {self.of_prompts} of prompts that change, in {self.changed}" if self.changed else ""
        return f"{self.examples:,} examples, {self.tokens:,} tokens, {self.different} differ{more}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A template: its tokenizer as transformers and as the trainer read it, in a folder for files."""

    name: str
    folder: Path
    theirs: Any
    ours: Tokenizer
    draw: random.Random
    count: int

    def conversations(self) -> list[dict[str, Any]]:
        """Lines that end with an answer."""
        found = [conversation(self.draw, self.name) for _ in range(self.count)]
        for record in found:
            while record["messages"][-1]["role"] != "assistant":
                record["messages"].pop()
        return found

    def prompt(self, record: dict[str, Any]) -> list[int]:
        """The ids of a prompt alone, up to where the model answers."""
        prompt = record["prompt"]
        if isinstance(prompt, str):
            return list(self.theirs(text=prompt)["input_ids"])
        tools = record.get("tools")
        return list(
            self.theirs.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )

    def open(self, records: Iterable[dict[str, Any]], *, kind: ChatKind = "chat", is_marked: bool = True) -> ChatFile:
        """The records as the trainer tokenises them; without `is_marked` by the template without `{% generation %}`."""
        path, plain = self.folder / "lines.jsonl", self.folder / "plain.jinja"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        plain.write_text(without_generation(TEMPLATES[self.name]))
        data = DataConfig(source=str(path), format="chat", tokenizer=str(self.folder), cache=str(self.folder / "cache"))
        chat = ChatConfig(template="" if is_marked else str(plain))
        return open_chat(SourceConfig(url=str(path), format="chat"), data, chat, self.ours, is_writer=True, kind=kind)


def messages(shape: Shape) -> Counted:
    """Answers alone are learned, by a template with and without `{% generation %}`."""
    records = shape.conversations()
    theirs = trl_rows.answers(records, shape.theirs, shape.folder, only_answers=True)
    return _sum(_compare(theirs, _rows(shape, shape.open(records, is_marked=marked))) for marked in (True, False))


def completions(shape: Shape) -> Counted:
    """A prompt and its last answer, as messages."""
    records = []
    for record in shape.conversations():
        *prompt, last = record["messages"]
        records.append(
            {key: record[key] for key in ("tools",) if key in record} | {"prompt": prompt, "completion": [last]}
        )
    theirs = trl_rows.answers(records, shape.theirs, shape.folder, only_answers=False)
    prompts = [shape.prompt(record) for record in records]
    return _sum(
        _compare(theirs, _rows(shape, shape.open(records, is_marked=marked)), prompts) for marked in (True, False)
    )


def texts(shape: Shape) -> Counted:
    """A prompt and a completion, as text."""
    records = [{"prompt": text(shape.draw), "completion": text(shape.draw) or "x"} for _ in range(shape.count)]
    theirs = trl_rows.answers(records, shape.theirs, shape.folder, only_answers=False)
    return _compare(theirs, _rows(shape, shape.open(records)), [shape.prompt(record) for record in records])


def packing(shape: Shape) -> Counted:
    """Conversations that share a row: each piece, and how full the rows are.

    A conversation of which the cut leaves nothing to learn stays in TRL's rows and out of ours.
    """
    records = shape.conversations()[:PACKED_AT_ONCE]
    rows = trl_rows.packed(records, shape.theirs, shape.folder, PACKED)
    file = shape.open(records)
    source = ChatSource(file, seq_len=PACKED, too_long="cut_right", is_packed=True, padding=shape.ours.separator)
    lengths = np.minimum(file.lengths, PACKED)
    ours = [
        piece
        for number, members in enumerate(pack(lengths[source.fit.kept], PACKED))
        for piece in _packed_pieces(source.sample(number), len(members))
    ]
    theirs = [piece for row in rows for piece in row if set(piece[1]) != {trl_rows.IGNORED}]
    left = Counter(ours)
    left.subtract(theirs)
    fills = (sorted(sum(len(ids) for ids, _, _ in row) for row in rows), _fills(lengths))
    different = sum(abs(times) * len(piece[0]) for piece, times in left.items()) + sum(
        abs(a - b) for a, b in zip(*fills, strict=True)
    )
    return Counted(examples=len(ours), tokens=sum(len(ids) for ids, _, _ in ours), different=different)


def preferences(shape: Shape) -> Counted:
    """Pairs of answers, with a prompt of their own and without one."""
    explicit, implicit = [], []
    for record in shape.conversations():
        *prompt, last = record["messages"]
        tools = {key: record[key] for key in ("tools",) if key in record}
        chosen, rejected = [last], [{"role": "assistant", "content": f"no {text(shape.draw)}."}]
        explicit.append(tools | {"prompt": prompt, "chosen": chosen, "rejected": rejected})
        implicit.append(tools | {"chosen": prompt + chosen, "rejected": prompt + rejected})
    prompts = [shape.prompt(record) for record in explicit]
    return _sum(_pairs(shape, records, prompts) for records in (explicit, implicit))


def _pairs(shape: Shape, records: Sequence[dict[str, Any]], prompts: Sequence[list[int]]) -> Counted:
    theirs = trl_rows.pairs(records, shape.theirs, shape.folder)
    file = shape.open(records, kind="pairs")
    source = PairSource(file, seq_len=WHOLE, too_long="stop", padding=shape.ours.separator)
    rows = [
        {name: field[side] for name, field in source.sample(n).items()} for n in range(len(source)) for side in (0, 1)
    ]
    ours = [_piece(row, int(length)) for row, length in zip(rows, file.lengths, strict=True)]
    return _compare([piece for pair in theirs for piece in pair], ours, prompts, per_prompt=2)


KINDS: dict[str, Callable[[Shape], Counted]] = {
    "messages": messages, "prompt + completion": completions, "text": texts, "packed": packing, "pairs": preferences,
}  # fmt: skip


def _rows(shape: Shape, file: ChatFile) -> list[Piece]:
    """Of every conversation; of one that the trainer leaves out, nothing is learned."""
    source = ChatSource(file, seq_len=WHOLE, too_long="stop", is_packed=False, padding=shape.ours.separator)
    places = {int(kept): number for number, kept in enumerate(source.fit.kept)}
    lengths = file.lengths.tolist()
    return [
        _piece(source.sample(places[number]), length) if number in places else _unlearned(file.read(number)[0].tolist())
        for number, length in enumerate(lengths)
    ]


def _unlearned(ids: list[int]) -> Piece:
    return tuple(ids), (trl_rows.IGNORED,) * len(ids), tuple(range(len(ids)))


def _piece(fields: Any, length: int) -> Piece:
    labels = fields["labels"]
    assert (labels[length:] == trl_rows.IGNORED).all()
    return tuple(fields["tokens"][:length].tolist()), tuple(labels[:length].tolist()), tuple(range(length))


def _packed_pieces(fields: Any, number: int) -> list[Piece]:
    found = []
    for document in range(number):
        here = fields["documents"] == document
        ids, labels, positions = (tuple(fields[name][here].tolist()) for name in ("tokens", "labels", "positions"))
        found.append((ids, labels, positions))
    return found


def _fills(lengths: Any) -> list[int]:
    """How full our rows of all these lengths are."""
    return sorted(int(lengths[members].sum()) for members in pack(lengths, PACKED))


def _compare(
    theirs: Sequence[Piece], ours: Sequence[Piece], prompts: Sequence[list[int]] = (), *, per_prompt: int = 1
) -> Counted:
    different, of_prompts = 0, []
    for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        places = [
            place
            for place, (a, b) in enumerate(zip(zip(*one, strict=True), zip(*other, strict=True), strict=False))
            if a != b
        ]
        excused: list[int] = []
        if prompts and one[0] == other[0]:
            first = number - number % per_prompt
            excused = _of_prompt(prompts[number // per_prompt], theirs[first : first + per_prompt], other)
        of_prompts.append(len(set(places) & set(excused)))
        different += abs(len(one[0]) - len(other[0])) + len(set(places) - set(excused))
    return Counted(
        examples=len(ours), tokens=sum(len(ids) for ids, _, _ in ours), different=different, of_prompts=sum(of_prompts),
        changed=sum(count > 0 for count in of_prompts),
    )  # fmt: skip


def _of_prompt(prompt: list[int], rows: Sequence[Piece], ours: Piece) -> list[int]:
    """Where labels are of the prompt, and learned by TRL: from the first id that changed in one of `rows`; none if none did."""
    start = min(_same(prompt, row[0]) for row in rows)
    learned = [place for place, label in enumerate(ours[1]) if label != trl_rows.IGNORED]
    return list(range(max(start - 1, 0), learned[0])) if start < len(prompt) and learned else []


def _same(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids the two begin with in common."""
    pairs = zip(ids, others, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(others)))


def _sum(parts: Iterable[Counted]) -> Counted:
    found = list(parts)
    return Counted(**{name: sum(getattr(part, name) for part in found) for name in Counted.__slots__})


def open_shape(name: str, count: int, seed: int, folder: Path) -> Shape:
    """The tokenizer of a template, made in `folder`; text ends with its eos token, as in TRL."""
    from transformers import PreTrainedTokenizerFast

    write_tokenizer(folder, TEMPLATES[name])
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = open_tokenizer(str(folder), separator=theirs.eos_token)
    return Shape(name, folder, theirs, ours, random.Random(f"{name} {seed}"), count)


def main(arguments: list[str]) -> int:
    """All kinds of all templates; exit code 1 if a token differs."""
    if find_spec("trl") is None:
        command = [environment_with([TRL], ROOT / ".trl"), "-m", "tools.chat.with_trl", *arguments]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode
    logging.disable(logging.WARNING)  # TRL's, of prompts that change
    warnings.simplefilter("ignore")
    count, seed = (int(value) for value in (*arguments, "1000", "1")[:2]) if arguments else (1000, 1)
    found = []
    for name in TEMPLATES:
        for kind, compare in KINDS.items():
            with TemporaryDirectory() as folder:
                one = compare(open_shape(name, count, seed, Path(folder)))
            write_text(f"{name:8}  {kind:20}  {one}")
            found.append(one)
    real = compare_real(max(count // 5, 1), seed)
    write_text(str(real))
    total = _sum(found)
    write_text(f"with {TRL} in all: {total}")
    return int(total.different + real.different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
