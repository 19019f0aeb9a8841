"""Conversations become tokens as in transformers; what cannot be learned from is named with its line."""

from __future__ import annotations

import gzip
import json
import shutil
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.token_rows import rows_of
from titan_ckpt.errors import ConfigError, DataError
from titan_ckpt.trainer.config.chat import ChatConfig
from titan_ckpt.trainer.config.train_config import DataConfig, SourceConfig
from titan_ckpt.trainer.config.validation import ValidationConfig
from titan_ckpt.trainer.data import chat_tokens
from titan_ckpt.trainer.data.batches import BatchShape, Dataset, open_chat, open_dataset
from titan_ckpt.trainer.data.chat_source import ChatSource, PairSource
from titan_ckpt.trainer.data.chat_template import ChatTemplate, TemplateProblem, open_template
from titan_ckpt.trainer.data.conversations import Chat, LineProblem, Pair, parse_record
from titan_ckpt.trainer.data.packing import pack
from titan_ckpt.trainer.data.tokenizer import open_tokenizer
from tools.chat.compare import count_differences, write_tokenizer
from tools.chat.templates import CHATML, GEMMA, QWEN, TEMPLATES, without_generation

DAY = date(2024, 7, 26)
USER, ANSWER = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2 🙂"}
GOOD = {"messages": [USER, ANSWER]}


def _template(source: str, **names: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", **names}, where="t.jinja", today=DAY)


class Folder:
    """A tokenizer with a chat template, and files of conversations."""

    def __init__(self, path: Path, tokenizer: Path) -> None:
        self.path = path
        shutil.copytree(tokenizer, path / "tok")

    def write(self, *lines: Any, name: str = "chat.jsonl") -> str:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
        data = text.encode("utf-8", "surrogatepass")
        (self.path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(self.path / name)

    def data(self, url: str, **settings: Any) -> DataConfig:
        return DataConfig(
            source=url, format="chat", tokenizer=str(self.path / "tok"), cache=str(self.path / "cache"),
            **{"seq_len": 64, "shuffle": False} | settings,
        )  # fmt: skip

    def open(self, url: str, chat: ChatConfig | None = None, **settings: Any) -> Dataset:
        data = self.data(url, **settings)
        tokenizer = open_tokenizer(data.tokenizer)
        return open_dataset(data, ValidationConfig(), tokenizer, seed=0, is_writer=True, chat=chat or ChatConfig())

    def learned(self, dataset: Dataset, index: int = 0) -> str:
        labels = dataset.sources[0].sample(index)["labels"]
        return open_tokenizer(str(self.path / "tok"))._tokenizer.decode(  # type: ignore[attr-defined,no-any-return]
            labels[labels != -100].tolist(), skip_special_tokens=False
        )


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chatml")
    write_tokenizer(made, CHATML)
    return made


@pytest.fixture
def folder(tmp_path: Path, chatml: Path) -> Folder:
    return Folder(tmp_path, chatml)


@pytest.mark.hf
@pytest.mark.parametrize("shape", list(TEMPLATES))
def test_ids_and_masks_equal_those_of_transformers(shape: str, tmp_path: Path) -> None:
    compared, different = count_differences(shape, 40, 7, tmp_path)
    assert compared > 5_000
    assert different == 0


@pytest.mark.hf
def test_the_comparison_sees_a_mask_of_one_token_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = chat_tokens.learned

    def wrong(offsets: Any, spans: Any) -> Any:
        return right(offsets, [(start, end - 10) for start, end in spans])

    monkeypatch.setattr("tools.chat.compare.learned", wrong)
    assert count_differences("chatml", 3, 7, tmp_path)[1] > 3


def test_only_answers_are_learned_and_the_end_of_each(folder: Folder) -> None:
    second = {"messages": [{"role": "system", "content": "be brief"}, USER, ANSWER, USER, {**ANSWER, "content": "3"}]}
    dataset = folder.open(folder.write(GOOD, second), chat=ChatConfig(pack=False))
    assert folder.learned(dataset, 0) == "2 🙂<|im_end|>\n"
    assert folder.learned(dataset, 1) == "2 🙂<|im_end|>\n3<|im_end|>\n"
    last = folder.open(folder.write(second), chat=ChatConfig(pack=False, train_on="last"))
    assert folder.learned(last) == "3<|im_end|>\n"


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.jsonl.gz"])
def test_bom_crlf_and_empty_lines_change_nothing(name: str, folder: Folder) -> None:
    plain = folder.open(folder.write(GOOD, GOOD, name="plain.jsonl"))
    odd = folder.open(folder.write("\ufeff" + json.dumps(GOOD) + "\r", "\r", json.dumps(GOOD) + "\r", "", name=name))
    assert plain.fingerprint == odd.fingerprint
    assert torch.equal(plain.sources[0].sample(0)["labels"], odd.sources[0].sample(0)["labels"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{not json", "not JSON"),
        ("[1]", "expected an object, found list"),
        ({"text": "x"}, r"expected messages, .* found \['text'\]"),
        ({"messages": []}, "messages: expected a list of messages, found []".replace("[", r"\[").replace("]", r"\]")),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [USER, {"role": "assistant"}]}, r"messages\[1\]: the answer has neither content nor tool_calls"),
        ({"messages": [{"role": 3, "content": "x"}, ANSWER]}, r"messages\[0\]: expected a role of text, found 3"),
        ({"messages": [{"role": "user", "content": 5}, ANSWER]}, r"messages\[0\]: expected content of text, found 5"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "parts that are no text"),
        ({"messages": "hello"}, "messages: expected a list of messages, found 'hello'"),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "tools: not JSON"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools: expected a list of objects"),
        ({"conversations": [{"from": ["human"], "value": "x"}]}, "unknown `from` "),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "unknown `from` 'bot'; known are human, gpt"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "a pair of chosen and rejected answers"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, r"messages\[0\]: the message has no content"),
        ({"messages": [USER, {**ANSWER, "tool_calls": 5}]}, "tool_calls: expected a list of objects, found 5"),
        ({"messages": [USER, {**ANSWER, "tool_calls": ["f()"]}]}, "tool_calls: expected a list of objects"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "all of which have weight 0"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"messages\[1\]: weight 0.5: expected 0 or 1"),
        ({"messages": [{**USER, "train": True}, ANSWER]}, r"messages\[0\]: train True of role user: answers alone"),
        ({"messages": [{"role": "system", "content": "a"}, USER, ANSWER], "system": "b"}, "another system message"),
        ({"messages": [USER, ANSWER], "system": ["b"]}, "system: expected text"),
        ({"prompt": "x", "completion": "y", "system": "b"}, "write it into the prompt"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "images: .* only text can be learned from"),
        ({"prompt": [USER], "completion": [ANSWER], "label": False}, "label is false: an answer that is not wanted"),
        ({"messages": [USER, ANSWER], "functions": [{"name": "f"}]}, "functions: the older name of tools"),
    ],
)
def test_bad_lines_are_named_or_skipped(line: Any, problem: str, folder: Folder) -> None:
    url = folder.write(GOOD, line)
    with pytest.raises(DataError, match=rf"chat\.jsonl: line 2: .*{problem}"):
        folder.open(url)
    dataset = folder.open(url, bad_line="skip")
    assert folder.learned(dataset) == "2 🙂<|im_end|>\n"


@pytest.mark.parametrize("source", [CHATML, without_generation(CHATML)])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}])
def test_an_answer_that_its_line_leaves_out_is_not_learned(source: str, mark: dict[str, Any], folder: Folder) -> None:
    (folder.path / "tok" / "chat_template.jinja").write_text(source)
    second = {**ANSWER, "content": "3", "weight": 1}
    line = {"messages": [USER, {**ANSWER, **mark}, USER, second]}
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "a", **mark}, {"from": "gpt", "value": "3"}]
    dataset = folder.open(folder.write(line, {"conversations": turns}), ChatConfig(pack=False))
    assert [folder.learned(dataset, index) for index in (0, 1)] == ["3<|im_end|>\n"] * 2
    last = {"messages": [USER, ANSWER, USER, {**second, "weight": 0}]}
    only = folder.open(folder.write(last), ChatConfig(train_on="last"))
    assert folder.learned(only) == "2 🙂<|im_end|>\n"


def test_blocks_that_are_not_one_per_answer_refuse_weights() -> None:
    source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(TemplateProblem, match=r"writes 1 \{% generation %\} blocks for 2 answers"):
        _template(source).render_answers([USER, ANSWER, ANSWER], left_out={1})


def test_system_beside_a_conversation_is_its_first_message(folder: Folder) -> None:
    system = {"role": "system", "content": "be brief"}
    written = {"messages": [system, USER, ANSWER]}
    prompted = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    lines = (
        written, {**GOOD, "system": "be brief"}, {**written, "system": "be brief"},
        {"prompt": [system, *prompted["prompt"]], "completion": [ANSWER]}, {**prompted, "system": "be brief"},
        {"system": "be brief", "conversations": [{"from": "user", "value": "1+1?"}, {"from": "assistant", "value": "2 🙂"}]},
    )  # fmt: skip
    source = folder.open(folder.write(*lines), ChatConfig(pack=False), seq_len=128).sources[0]
    for group in ((0, 1, 2, 5), (3, 4)):
        samples = [source.sample(index) for index in group]
        for sample in samples[1:]:
            assert all(torch.equal(sample[name], samples[0][name]) for name in sample)


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\\ud83d"}]}',
        '{"prompt": "a\\ud83d", "completion": "b"}',
    ],
)
def test_half_of_a_surrogate_pair_is_refused(line: str, folder: Folder) -> None:
    with pytest.raises(DataError, match=r"line 1: the text has '\\ud83d', half of a surrogate pair"):
        folder.open(folder.write(line))


def test_an_emoji_of_many_tokens_is_learned_whole(folder: Folder) -> None:
    template = CHATML.replace("message['content'] + '<|im_end|>' + '\\n' }}{% endgen", "message['content'] }}{% endgen")
    (folder.path / "tok" / "chat_template.jinja").write_text(template)
    emoji = {"messages": [USER, {"role": "assistant", "content": "👩\u200d👩\u200d👧"}]}
    assert folder.learned(folder.open(folder.write(emoji))) == "👩\u200d👩\u200d👧"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if not loop.last and m.role == 'assistant' %}(cut)"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template, turns = _template(source), [USER, ANSWER, USER, ANSWER]
    with pytest.raises(TemplateProblem, match=r"before answer 1 differently .*'2 🙂' becomes '\(cut\)"):
        template.render_answers(turns)
    found = template.render_answers(turns, last_only=True)
    assert [found.text[start:end] for start, end in found.spans] == ["2 🙂"]


def test_a_template_that_is_refused_says_its_own_reason(folder: Folder) -> None:
    (folder.path / "tok" / "chat_template.jinja").write_text(without_generation(GEMMA))
    with pytest.raises(DataError, match="line 1: TemplateError: Conversation roles must alternate"):
        folder.open(folder.write({"messages": [USER, USER, ANSWER]}))
    with pytest.raises(DataError, match="line 1: TemplateError: System role not supported"):
        folder.open(folder.write({"messages": [{"role": "system", "content": "x"}, USER, ANSWER]}))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 1 // 0 }}",
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    ],
)
def test_hostile_templates_are_one_problem(source: str) -> None:
    with pytest.raises(TemplateProblem):
        _template(source).render_answers([USER, ANSWER])


def test_what_is_no_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"t\.jinja: not a chat template: TemplateSyntaxError"):
        _template("{% if %}")


def test_marks_in_the_text_of_a_conversation_are_left_alone() -> None:
    said = {"role": "assistant", "content": "\ufdd00<x\ufdd00>"}
    found = _template(CHATML).render_answers([{**USER, "content": "\ufdd01>"}, said])
    assert [found.text[start:end] for start, end in found.spans] == ["\ufdd00<x\ufdd00><|im_end|>\n"]


def test_templates_are_found_where_transformers_looks(tmp_path: Path, chatml: Path) -> None:
    shutil.copytree(chatml, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert open_template(str(tmp_path), today=DAY)[0].render([USER]) == "from file"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        open_template(str(tmp_path), today=DAY)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ eos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": both}))
    plain, tools = open_template(str(tmp_path), today=DAY)
    assert (plain.render([USER]), tools.render([USER])) == ("plain", "tools </s>")
    (tmp_path / "own.jinja").write_text("own")
    assert open_template(str(tmp_path), str(tmp_path / "own.jinja"), today=DAY)[1].render([USER]) == "own"
    with pytest.raises(ConfigError, match=r"chat\.template = .*none\.jinja"):
        open_template(str(tmp_path), str(tmp_path / "none.jinja"), today=DAY)


def test_a_template_is_told_the_same_day_at_every_resume() -> None:
    assert _template("{{ strftime_now('%d %b %Y') }}").render([USER]) == "26 Jul 2024"


def test_long_conversations_stop_the_run_or_are_cut_and_counted(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"messages": [{**USER, "content": "x" * 99}, {**ANSWER, "content": "y" * 99 + "z"}]}
    url = folder.write(GOOD, long, long)
    with pytest.raises(DataError, match=r"chat\.jsonl: line 2: \d+ tokens, but data.seq_len = 32; 2 of 3 examples"):
        folder.open(url, seq_len=32)
    skipped = folder.open(url, ChatConfig(too_long="skip"), seq_len=32)
    assert (len(skipped.sources[0]), folder.learned(skipped)) == (1, "2 🙂<|im_end|>\n")
    left = folder.open(url, ChatConfig(too_long="cut_left"), seq_len=32)
    assert folder.learned(left, 1).endswith("yz<|im_end|>\n")
    right = folder.open(url, ChatConfig(too_long="cut_right"), seq_len=32)
    assert len(right.sources[0]) == 1  # nothing is left to learn of the others
    assert "2 left out, which are longer than 32 tokens" in caplog.text
    assert "2 cut to 32 tokens" in caplog.text
    assert "2 left out, in which nothing is learned" in caplog.text


def test_packed_documents_begin_anew_and_see_themselves_alone(folder: Folder) -> None:
    dataset = folder.open(folder.write(*[GOOD] * 5))
    sample = dataset.sources[0].sample(0)
    documents, positions = sample["documents"], sample["positions"]
    starts = [0, *(i for i in range(1, 64) if documents[i] != documents[i - 1])]
    assert len(starts) > 2
    assert positions[starts].tolist() == [0] * len(starts)
    assert (sample["labels"][torch.tensor(starts[1:]) - 1] == -100).all()  # nothing is predicted across the border
    assert (dataset.sources[0].filler()["labels"] == -100).all()  # type: ignore[attr-defined]


def test_packing_fills_bins_and_loses_nothing() -> None:
    draw = np.random.default_rng(0)
    for size in (1, 7, 512):
        lengths = draw.integers(1, size + 1, 400)
        bins = pack(lengths, size)
        assert sorted(number for members in bins for number in members) == list(range(400))
        assert max(lengths[members].sum() for members in bins) <= size
        assert len(bins) <= 1.25 * lengths.sum() / size + 1


def test_every_mesh_and_resume_sees_the_same_samples(folder: Folder) -> None:
    turns = [{"messages": [{**USER, "content": f"{n}?"}, {**ANSWER, "content": f"{n}!"}]} for n in range(40)]
    dataset = folder.open(folder.write(*turns), shuffle=True)

    whole = rows_of(dataset, 1, 0, 40)
    assert whole == rows_of(dataset, 2, 0, 40) == rows_of(dataset, 4, 0, 20) + rows_of(dataset, 2, 20, 40)


def test_pairs_share_their_prompt(folder: Folder) -> None:
    better, worse = {**ANSWER, "content": "yes"}, {**ANSWER, "content": "no"}
    lines = [
        {"prompt": [USER], "chosen": [better], "rejected": [worse]},
        {"chosen": [USER, ANSWER, USER, better], "rejected": [USER, ANSWER, USER, worse]},
        {"prompt": "Q:", "chosen": " a", "rejected": " b"},
    ]
    data = folder.data(folder.write(*lines))
    tokenizer = open_tokenizer(data.tokenizer)
    source = SourceConfig(url=data.source)
    file = open_chat(source, data, ChatConfig(), tokenizer, is_writer=True, kind="pairs")
    pairs = PairSource(file, seq_len=64, too_long="stop", padding=0)

    def learned(index: int) -> list[str]:
        rows = pairs.sample(index)["labels"]
        return [tokenizer._tokenizer.decode(row[row != -100].tolist(), skip_special_tokens=False) for row in rows]  # type: ignore[attr-defined]

    assert [learned(index) for index in range(3)] == [
        ["yes<|im_end|>\n", "no<|im_end|>\n"],
        ["yes<|im_end|>\n", "no<|im_end|>\n"],
        [" a<|endoftext|>", " b<|endoftext|>"],
    ]
    url = SourceConfig(url=folder.write(GOOD, name="other.jsonl"))
    with pytest.raises(DataError, match="line 1: expected chosen and rejected answers, found a conversation"):
        open_chat(url, data, ChatConfig(), tokenizer, is_writer=True, kind="pairs")


def test_texts_mixed_with_packed_conversations_have_their_fields(folder: Folder) -> None:
    (folder.path / "plain.txt").write_text("some text " * 50)
    mixture = (
        SourceConfig(url=folder.write(GOOD, GOOD), format="chat"),
        SourceConfig(url=str(folder.path / "plain.txt")),
    )
    data = DataConfig(mixture=mixture, tokenizer=str(folder.path / "tok"), cache=str(folder.path / "cache"), seq_len=32)
    tokenizer = open_tokenizer(data.tokenizer)
    dataset = open_dataset(data, ValidationConfig(), tokenizer, seed=0, is_writer=True)
    batch = dataset.batch(0, BatchShape(global_batch_size=8, microbatch_size=8))
    assert set(batch.microbatches[0]) == {"tokens", "labels", "documents", "positions"}
    assert isinstance(dataset.sources[0], ChatSource)


def test_share_gpt_and_reasoning_are_read() -> None:
    found = parse_record({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
    assert isinstance(found, Chat)
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    shown = _template("{{ messages[1].reasoning_content }}{{ messages[1].thinking }}")
    assert shown.render([USER, {**ANSWER, "reasoning": "hm"}]) == "hmhm"


def test_pairs_without_a_prompt_begin_alike() -> None:
    a, b = {**ANSWER, "content": "a"}, {**ANSWER, "content": "b"}
    found = parse_record({"chosen": [USER, ANSWER, USER, a], "rejected": [USER, ANSWER, USER, b]})
    assert isinstance(found, Pair)
    assert isinstance(found.chosen, Chat)
    assert found.chosen.first == 3
    with pytest.raises(LineProblem, match="no message of the assistant"):
        parse_record({"chosen": [USER, a], "rejected": [USER, a, USER]})


def test_tools_reach_the_template_also_as_text() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools)):
        found = parse_record({"messages": [USER, ANSWER], "tools": given, "chat_template_kwargs": {"x": 1}})
        assert isinstance(found, Chat)
        text = _template(QWEN).render(found.messages, tools=found.tools, names=found.names)
        assert '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>' in text
