"""Bytes that others wrote: JSON, pickles and compressed files that would hang, fill the memory or crash are refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import zstandard

from titan_ckpt.errors import ConfigError, DamagedError, TitanError
from titan_ckpt.format.dcp_read import read_dcp_metadata
from titan_ckpt.parsing.json_values import MAX_VALUES, JsonValue, parse_json, show
from titan_ckpt.parsing.pickle_check import MAX_MEMOIZED, MAX_TUPLES, _end_if_plain, check_pickle
from titan_ckpt.parsing.pickle_stack import walk
from titan_ckpt.parsing.unpacking import UNPACKED_FREE, unpacked
from titan_ckpt.resharding.placement_rules import read_rules
from titan_ckpt.sharding.mesh import MAX_RANKS, MeshSpec
from tools.paths import DATA

BAD_JSON = {
    "key twice": b'{"a": 1, "a": 2}',
    "infinity": b'{"a": Infinity}',
    "not a number": b"[NaN]",
    "a float past the largest": b"[1e999]",
    "half of a surrogate pair": b'["\\ud800"]',
    "not UTF-8": b'["\xff"]',
    "deep": b"[" * 100_000,
    "many values": b"[" + b"1," * MAX_VALUES + b"1]",
    "an integer of 5000 digits": b"[" + b"9" * 5000 + b"]",
}


@pytest.mark.parametrize("what", BAD_JSON)
def test_json_that_no_program_of_ours_writes_is_damage(what: str) -> None:
    with pytest.raises(DamagedError, match=r"x\.json: not JSON"):
        parse_json(BAD_JSON[what], "x.json")


def test_many_keys_of_one_name_are_refused_in_linear_time() -> None:
    text = b"{" + b",".join(b'"k%d":0' % n for n in range(200_000)) + b',"k0":1}'
    started = time.process_time()
    with pytest.raises(DamagedError, match="'k0' twice"):
        parse_json(text, "x")
    assert time.process_time() - started < 5


READS: dict[str, Callable[[JsonValue], object]] = {
    "whole": lambda v: v.whole(),
    "wholes": lambda v: v.wholes(),
    "text": lambda v: v.text(),
    "number": lambda v: v.number(),
    "flag": lambda v: v.flag(),
    "entries": lambda v: list(v.entries()),
    "table": lambda v: v.table(),
    "free": lambda v: v.free(),
    "key": lambda v: v["k"],
    "items": lambda v: list(v.items()),
}
RIGHT: dict[str, list[Any]] = {
    "whole": [0, 3], "wholes": [[], [1]], "text": ["", "a"], "number": [0, 3, -1, 1.5, 2**63], "flag": [True],
    "entries": [[], [1], ["a"]],
    "table": [{}, {"k": 1}], "free": [{}, {"k": 1}], "key": [{"k": 1}], "items": [{}, {"k": 1}],
}  # fmt: skip
VALUES = [None, True, 0, 3, -1, 1.5, 10**400, 2**63, "", "a", [], [1], [True], ["a"], {}, {"k": 1}]


@pytest.mark.parametrize("kind", READS)
def test_a_place_takes_values_of_its_own_type_alone(kind: str) -> None:
    for value in VALUES:
        document = JsonValue({"a": {"b": value}}, "f.json")["a"]["b"]
        if any(repr(value) == repr(right) for right in RIGHT[kind]):
            READS[kind](document)
        elif not (kind == "entries" and isinstance(value, list)):
            with pytest.raises(DamagedError, match=r"^f\.json: a\.b: (expected|has no)"):
                READS[kind](document)


def test_free_values_are_not_deep() -> None:
    value: Any = {}
    for _ in range(100):
        value = {"a": [value]}
    with pytest.raises(DamagedError, match="levels"):
        JsonValue(value, "f").free()


def test_any_value_is_shown_in_short_ascii() -> None:
    values: list[Any] = [10**5000, "\ud800" * 9000, [[[[]]]] * 9, {"a": {"b": {"c": 1}}}, b"x", 1e308]
    for value in values:
        assert show(value).isascii()
        assert len(show(value)) < 700


DOUBLED = b"h\x00h\x00\x86q\x00"
PAIR = b"X\x01\x00\x00\x00aq\x00h\x00h\x00\x86q\x01"  # of a memoized text, memoized, as torch writes a group
HANGS = {
    "pairs of memoized pairs": b"\x80\x02}" + PAIR + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(1, 60)) + b"Ns.",
    "pairs of pairs by other names": b"\x80\x02}" + PAIR
    + b"".join(b"h%cq%ch%ch%c\x86q%c" % (n, n + 1, n + 1, n + 1, n + 2) for n in range(1, 120, 2)) + b"Ns.",
    "pairs of pairs and texts": b"\x80\x02}" + PAIR + b"X\x01\x00\x00\x00bq\x02\x86q\x03" * 50_000 + b"Ns.",
    "tuples of tuples as keys": b"\x80\x02}K\x01\x85q\x00" + DOUBLED * 40 + b"Ns.",
    "the same as members of a set": b"\x80\x04\x8f(K\x01\x85q\x00" + DOUBLED * 40 + b"\x90.",
    "doubled on the stack": b"\x80\x02}K\x01" + b"2\x86" * 60 + b"Ns.",
    "a tuple 200,000 deep": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "a big integer as many keys": b"\x80\x02}(\x8b\x40\x0d\x03\x00" + b"\x7f" * 200_000 + b"q\x00N" + b"h\x00N" * 100_000 + b"u.",
    "a memo of 32 GB": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "lists without end": b"\x80\x02(" + b"]" * 600_000 + b"l.",
    "half of a surrogate pair": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
    "the same in an escape": b"\x80\x00V\\ud800\n.",
    "a pop too many": b"\x80\x020.",
    "a memo entry that is not there": b"\x80\x02h\x05\x85q\x00.",
}  # fmt: skip


@pytest.mark.parametrize("what", HANGS)
def test_pickle_that_hangs_is_refused_before_it_runs(what: str) -> None:
    started = time.process_time()
    with pytest.raises(DamagedError):
        check_pickle(HANGS[what], where="x")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_the_end_of_a_pickle_is_found_in_what_follows(protocol: int) -> None:
    value = {"a": [1, -3, 2.5, "x" * 300, b"y", 1 << 90, None, True], (1, ("b", 2)): {3, "c"}, "t": ((("d",),),)}
    value["again"] = value["t"]
    data = pickle.dumps(value, protocol=protocol)
    assert check_pickle(data + data, where="x") == len(data)


SHARED = {
    "a path that doubles": b"\x80\x02cpathlib\nPosixPath\nX\x04\x00\x00\x00aaaaq\x00" + b"0" + b"".join(
        b"cpathlib\nPosixPath\nh\x00h\x00\x86Rq\x00" for _ in range(40)) + b".",
    "a shape of many dimensions": b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 5000 + b"t\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED)
def test_functions_of_an_index_make_small_values_alone(what: str) -> None:
    with pytest.raises(DamagedError):
        read_dcp_metadata(SHARED[what], sizes={}, step=1, where="x")


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".zst": zstandard.compress, ".xz": lzma.compress, ".bz2": bz2.compress,
}  # fmt: skip


@pytest.mark.parametrize("ending", PACK)
def test_a_small_file_that_unpacks_to_gigabytes_is_refused(ending: str) -> None:
    bomb = PACK[ending](bytes(256 << 20))
    tracemalloc.start()
    with pytest.raises(DamagedError, match="unpacks from"):
        for _ in unpacked("a" + ending, [bomb], packed_bytes=len(bomb) // 16, most_bytes=1 << 40):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@pytest.mark.parametrize("ending", PACK)
def test_packed_text_comes_back_from_any_parts(ending: str) -> None:
    text = b"".join(b"step %d\n" % n for n in range(300_000))
    packed = PACK[ending](text[: 1 << 20]) + PACK[ending](text[1 << 20 :])
    parts = [packed[at : at + 777] for at in range(0, len(packed), 777)]
    found = b"".join(unpacked("a" + ending, parts, packed_bytes=len(packed), most_bytes=UNPACKED_FREE))
    assert found == text


@pytest.mark.parametrize("ending", PACK)
def test_a_truncated_file_gives_what_can_be_read(ending: str) -> None:
    text = json.dumps(list(range(300_000))).encode()
    packed = PACK[ending](text)[:-100]
    found = b"".join(unpacked("a" + ending, [packed], packed_bytes=len(packed), most_bytes=1 << 30))
    assert found
    assert text.startswith(found)
    with pytest.raises(DamagedError, match="damaged compression"):
        list(unpacked("a" + ending, [b"x" * 50], packed_bytes=50, most_bytes=1 << 30))


def test_many_empty_members_take_linear_time() -> None:
    packed = gzip.compress(b"") * 50_000 + gzip.compress(b"end")
    started = time.process_time()
    assert b"".join(unpacked("a.gz", [packed], packed_bytes=len(packed), most_bytes=1 << 30)) == b"end"
    assert time.process_time() - started < 10


@pytest.mark.parametrize("text", ["dp_shard=100000000", "dp_shard=1024,tp=1024", "tp=²", "tp=" + "9" * 500])
def test_a_mesh_of_absurd_size_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MeshSpec.parse(text)
    assert len(str(caught.value)) < 300
    assert MeshSpec.parse(f"dp_shard={MAX_RANKS}").world_size == MAX_RANKS


@pytest.mark.parametrize("dim", ["²", "64", "9" * 500, "-1", ""])
def test_a_rule_for_a_dimension_that_no_tensor_has_is_refused(dim: str) -> None:
    with pytest.raises(TitanError):
        read_rules(f'[placements]\n"*" = ["tp:{dim}"]', where="t")


def test_dump_of_torch_is_checked_by_regular_expression() -> None:
    for name in ("all_ops/rank_0", "chain/rank_0", "ring/rank_1"):
        data = (DATA / "flight_recorder" / name).read_bytes()
        assert _end_if_plain(data, "x", "strict") == walk(data, "x") == len(data)


TOKENS = {
    b"h\x00": 0, b"h\x01": 1, b"h\x02": 2, b"j\x01\x00\x00\x00": 1, b"q\x01": 1, b"q\x02": 2, b"r\x01\x00\x00\x00": 1,
    b"\x86": 0, b"X\x01\x00\x00\x00c": 0,
}  # fmt: skip


def heaviest(tokens: Sequence[bytes]) -> int:
    """How many steps the heaviest tuple takes to be hashed."""
    stack, memo, most = [1, 1], {0: 1}, 1
    for token in tokens:
        if token[:1] in b"hj":
            stack.append(memo.get(TOKENS[token], 1))
        elif token[:1] in b"qr":
            memo[TOKENS[token]] = stack[-1]
        elif token == b"\x86":
            stack.append(1 + stack.pop() + (stack.pop() if stack else 1))
        else:
            stack.append(1)
        most = max(most, stack[-1])
    return most


@pytest.mark.parametrize("seed", range(20))
def test_tuples_that_pass_by_regular_expression_are_light(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(2000):
        tokens = draw.choices([*TOKENS], k=draw.randint(1, 40))
        data = b"\x80\x02}X\x01\x00\x00\x00aq\x00" + b"".join(tokens) + b"Ns."
        if _end_if_plain(data, "x", "strict") is not None:
            assert heaviest(tokens) <= 4 * (MAX_TUPLES + MAX_MEMOIZED)
