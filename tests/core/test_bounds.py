"""Small files of others that once took memory, time, or an error that no caller expects: each is one error, in bounds."""

from __future__ import annotations

import io
import json
import math
import time
import zipfile
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from titan_ckpt.debug.incident.black_box import unpack_members
from titan_ckpt.debug.read.black_boxes import MAX_MEMBERS_IN_RUN, BoxReader
from titan_ckpt.debug.read.name_tables import Interner
from titan_ckpt.errors import ConfigError, DamagedError, DataError
from titan_ckpt.format.foreign_blob import check_records
from titan_ckpt.format.names import OWNER
from titan_ckpt.parsing.json_values import MAX_VALUES, parse_json_line
from titan_ckpt.resharding.placement_rules import read_rules
from titan_ckpt.store.open import open_store
from titan_ckpt.toml_text import MAX_TEXT, parse_toml
from titan_ckpt.trainer.config.toml_records import parse_set, read_file
from titan_ckpt.trainer.data.corpus import DocumentReader, list_files
from titan_ckpt.trainer.data.records import read_documents
from titan_ckpt.trainer.data.token_files import BIN, HEADER, open_tokens
from titan_ckpt.trainer.report.goodput import goodput
from titan_ckpt.trainer.report.plot import draw_svg, nice_ticks, run_panels
from titan_ckpt.trainer.report.records import parse_records
from titan_ckpt.tui.data.metrics import parse_metric_lines
from titan_ckpt.upkeep.ownership import FencedError, check_claim, claim
from tools.fuzz.evidence import boxes, with_text
from tools.fuzz.memory_store import MemoryStore

ODD_TOML = {
    "a number of 5,000 digits": "a = " + "9" * 5000,
    "brackets": "a = " + "[" * 5000,
    "a key of many parts": "a." * 8000 + "a = 1",
    "a quoted key of many parts": '"a" . ' * 8000 + "a = 1",
    "a table of many parts": "[" + "a." * 8000 + "a]",
    "too long": "#" * (MAX_TEXT + 1),
    "nothing that is TOML": "\x00",
}


@pytest.mark.parametrize("what", ODD_TOML)
def test_odd_toml_is_a_config_error_at_once(what: str, tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"x\.toml"):
        parse_toml(ODD_TOML[what], "x.toml")
    (tmp_path / "x.toml").write_text(ODD_TOML[what])
    with pytest.raises(ConfigError, match=r"x\.toml"):
        read_file(str(tmp_path / "x.toml"))
    assert time.process_time() - started < 2


@pytest.mark.parametrize("value", ["0x" + "f" * 5000, f'["tp:0", 0x{"f" * 5000}]', "{a = 1}", "1979-05-27", "[[]]"])
def test_a_rule_of_a_wrong_type_is_a_config_error(value: str) -> None:
    with pytest.raises(ConfigError, match="rules"):
        read_rules(f'[placements]\n"*.w" = {value}', where="rules")


def test_long_values_of_a_set_are_text_or_errors() -> None:
    assert parse_set("a=" + "x" * 100_000) == ("a", "x" * 100_000)
    with pytest.raises(ConfigError):
        parse_set("a=[" + "[" * 100_000)


@pytest.mark.parametrize("line", [b"[" * 100_000, b"[" + b"1," * MAX_VALUES + b"1]", b"9" * 5000, b"\xff", b""])
def test_a_line_that_is_no_sane_json_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json_line(line)


def test_metrics_of_many_names_and_steps_are_refused() -> None:
    lines = b"".join(b'{"step":%d,"a%d":1}\n' % (step, step % 999) for step in range(20_000))
    with pytest.raises(DamagedError, match="no run's metrics"):
        parse_metric_lines(lines, "m")
    usual = b"".join(b'{"step":%d,"loss":1,"lr":2}\n' % step for step in range(20_000))
    assert len(parse_metric_lines(usual, "m").steps) == 20_000


def test_groups_of_a_million_ranks_do_not_fill_memory() -> None:
    lines = [f'["group",{n},["{n}","d",{{"from":0,"to":1000000,"by":1}}]]' for n in range(12)]
    box = BoxReader(Interner()).parse(with_text(boxes()[0][1], "\n".join(lines).encode()), "box")
    known = [len(group.members) for group in box.groups]
    assert known[:4] == [1_000_001] * 4
    assert sum(known) <= MAX_MEMBERS_IN_RUN


@pytest.mark.parametrize(
    "ranks", [[10**30], [-1], [True], [1.0], {"from": 0, "to": 10**12, "by": 1}, {"from": 0, "to": 1, "by": 0}]
)
def test_what_is_no_rank_is_no_member(ranks: Any) -> None:
    assert unpack_members(ranks) == ()


def _overlapping(records: int, size: int) -> bytes:
    """An archive whose directory lists one record many times."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("data/0", bytes(size))
        archive.filelist *= records
    return out.getvalue()


def test_one_record_listed_many_times_is_damage_at_once() -> None:
    blob = _overlapping(5000, 1 << 18)
    started = time.process_time()
    damages, _ = check_records(MemoryStore({"f": blob}), "f", 0, len(blob))
    assert [(d.start, d.end) for d in damages] == [(0, len(blob))]
    assert time.process_time() - started < 1  # 1.3 GB would be read


def test_many_damaged_records_take_linear_time() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(6000):
            archive.writestr(f"data/{number}", b"1234")
        for info in archive.filelist:
            info.CRC = zlib.crc32(b"other")
    blob = out.getvalue()
    started = time.process_time()
    damages, _ = check_records(MemoryStore({"f": blob}), "f", 0, len(blob))
    assert len(damages) == 6000
    assert all(a.end == b.start for a, b in pairwise(damages))
    assert time.process_time() - started < 8  # 36 million comparisons took longer


GOOD_HEADER = {
    "version": 1, "dtype": "<u2", "num_tokens": 2, "num_documents": 1, "vocab_size": 256, "separator": 0, "tokenizer": "bytes",
    "digest": "0", "skipped_lines": 0,
}  # fmt: skip
HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda h: [h],
    "another dtype": lambda h: h | {"dtype": "O"},
    "no dtype": lambda h: h | {"dtype": "zz"},
    "text for a number": lambda h: h | {"num_tokens": "2"},
    "negative": lambda h: h | {"num_tokens": -2},
    "a later version": lambda h: h | {"version": 2},
    "true": lambda h: h | {"version": True},
    "infinite": lambda h: h | {"vocab_size": math.inf},
    "less": lambda h: {name: value for name, value in h.items() if name != "separator"},
    "nested": lambda h: h | {"digest": json.loads("[" * 900 + "]" * 900)},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_of_tokens_of_wrong_types_is_a_data_error(what: str, tmp_path: Path) -> None:
    (tmp_path / BIN).write_bytes(bytes(4))
    (tmp_path / HEADER).write_text(json.dumps(GOOD_HEADER))
    assert len(open_tokens(str(tmp_path))) == 2
    (tmp_path / HEADER).write_text(json.dumps(HEADERS[what](GOOD_HEADER)))
    with pytest.raises(DataError, match=HEADER):
        open_tokens(str(tmp_path))


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08" + b"\0" * 7 + b"\xff" * 40, b"\x1f\x8b", b""])
def test_a_broken_gzip_corpus_is_a_data_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(content + b"x" * (not content))
    with pytest.raises(DataError, match=r"a\.txt\.gz"):
        list(read_documents(list_files(str(tmp_path / "a.txt.gz"))[0], DocumentReader()))


@pytest.mark.parametrize(
    "claimed",
    [b"", b"[" * 5000, b"[]", b'{"owner": 3}', b'{"owner": "x"}', b'{"owner": "x", "host": ["' + b"a" * 9999 + b'"]}'],
)
def test_an_odd_claim_fences_the_job(claimed: bytes, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    token = claim(store)
    check_claim(store, token)
    store.write(OWNER, [claimed])
    with pytest.raises(FencedError) as caught:
        check_claim(store, token)
    assert len(str(caught.value)) < 1500


ODD_RECORDS = (
    '{"event": "step", "time_s": 1}', '{"event": ["step"], "time_s": 1}', '{"event": "step", "time_s": "x", "step": 1}', "[1]",
    '{"event": "save", "time_s": 1, "step": 3, "stall_s": null}', '{"event": "start", "time_s": 1, "step": 1e999}', "[" * 5000,
    '{"event": "step", "time_s": 1, "step": 3, "step_s": 1, "data_wait_s": 0, "loss": "x"}', '{"event": "end", "time_s": true}',
)  # fmt: skip
RECORDS = (
    '{"event": "start", "time_s": 1, "step": 0}',
    '{"event": "step", "time_s": 2, "step": 1, "step_s": 1, "data_wait_s": 0, "loss": null, "tokens_per_s": 3}',
    '{"event": "validation", "time_s": 2, "step": 1, "seconds": 1, "loss": null}',
    '{"event": "step", "time_s": 1e17, "step": 100000000000000000, "step_s": 1e17, "data_wait_s": -1e17, "loss": -1e17}',
)


@pytest.mark.parametrize(
    ("low", "high"),
    [(1e-15, 2e-15), (-1e17, -1e17), (1e17, 1e17 + 16), (-1e17, 1e17), (5e-324, 1e-300), (0.1, 0.1), (0.0, 1e-9)],
)
def test_ticks_enclose_values_of_any_size(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert len(ticks) < 20
    assert ticks[0] <= low <= high <= ticks[-1]
    assert ticks[0] < ticks[-1]


def test_odd_records_are_no_records_and_the_rest_is_drawn() -> None:
    assert parse_records("\n".join(ODD_RECORDS)) == []
    records = parse_records("\n".join((*ODD_RECORDS, *RECORDS)))
    assert len(records) == len(RECORDS)
    assert draw_svg("run", goodput(records).text(), run_panels(records)).endswith("</svg>\n")
