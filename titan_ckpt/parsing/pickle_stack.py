"""Follow a pickle's opcodes on a stack of weights, to bound what its keys cost to hash.

A value's weight is the number of items that hashing it visits: 1 for a text, a small number, an instance; for a tuple the sum
of its items and 1, however often the memo repeats one of them; for a big integer its 8-byte words. Lists and dicts count 1: they
cannot be hashed. A key's weight also bounds its depth.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import TypeAlias

from titan_ckpt.errors import DamagedError

MAX_KEY_WEIGHT = 10_000
"""Sum of the weights of all keys that are not plain: tuples, big integers."""
_MOST = 1 << 40
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_TEXTS = frozenset(b"X\x8c\x8d")
_OPCODES = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_LINES = {code: 2 if code in b"ci" else 1 for code, o in _OPCODES.items() if o.arg and o.arg.n == -1}
# Bytes of opcodes that only push one plain value, argument included; 0 for all others.
_PUSHED = [0] * 256
for _code in b"NKMJG\x88\x89]})\x8f\x97":
    _PUSHED[_code] = 1 + (_OPCODES[_code].arg.n if _OPCODES[_code].arg else 0)  # type: ignore[union-attr]


class Walk:
    """The stack, the marks on it and the memo, in weights."""

    __slots__ = ("at", "data", "errors", "keys", "marks", "memo", "stack", "where")

    def __init__(self, data: bytes, where: str, errors: str) -> None:
        self.data, self.where, self.errors = data, where, errors
        self.at = self.keys = 0
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: dict[int, int] = {}

    def fail(self, text: str) -> DamagedError:
        return DamagedError(f"{self.where}: byte {self.at} {text}; nothing was loaded")

    def items(self) -> list[int]:
        """What is above the last mark, taken off the stack with the mark."""
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def key(self, weight: int) -> None:
        if weight > 1:
            self.keys += weight
            if self.keys > MAX_KEY_WEIGHT:
                raise self.fail("has tuples as keys that take too long to hash")

    def number(self, size: int) -> int:
        """The unsigned argument of `size` bytes."""
        return int.from_bytes(self.data[self.at + 1 : self.at + 1 + size], "little")


Effect: TypeAlias = Callable[[Walk], None]


def walk(data: bytes, where: str, errors: str = "strict") -> int:
    """The end of the pickle. DamagedError if it is truncated, has unknown opcodes, or goes past a limit.

    Text must be UTF-8; `errors` is as of `bytes.decode`.
    """
    state = Walk(data, where, errors)
    stack, memo, end = state.stack, state.memo, len(data)
    try:
        while state.at < end:
            code = data[state.at]
            if step := _PUSHED[code]:
                stack.append(1)
                state.at += step
            elif code == 0x68:  # BINGET
                stack.append(memo[data[state.at + 1]])
                state.at += 2
            elif code == 0x2E:  # STOP
                return state.at + 1
            else:
                _EFFECTS[code](state)
                state.at += _length(state, code)
    except (IndexError, KeyError) as error:
        raise state.fail(f"does not follow from the opcodes before it ({type(error).__name__})") from error
    raise DamagedError(f"{where}: the pickle is truncated after {end} bytes")


def _length(state: Walk, code: int) -> int:
    """Bytes of an opcode with its argument, which must be inside the file and a text be UTF-8."""
    argument, at = _OPCODES[code].arg, state.at
    if argument is None:
        return 1
    if argument.n >= 0:
        return 1 + argument.n
    if code in _LINES:
        stop = at
        for _ in range(_LINES[code]):
            stop = state.data.find(b"\n", stop + 1)
            if stop < 0:
                raise state.fail("is not an opcode, or reaches past the end")
        return stop + 1 - at
    size = _LENGTH_BYTES[argument.n]
    start = at + 1 + size
    stop = start + state.number(size)
    if stop > len(state.data):
        raise state.fail("is not an opcode, or reaches past the end")
    if code in _TEXTS:
        try:
            state.data[start:stop].decode("utf-8", state.errors)
        except UnicodeDecodeError as error:
            raise state.fail("holds text that is not UTF-8") from error
    return stop - at


def _push(state: Walk) -> None:
    state.stack.append(1)


def _nothing(_: Walk) -> None:
    """Opcodes that leave the stack as it is."""


def _replace(count: int) -> Effect:
    """Take `count` values for an instance, a class or a function's name."""

    def effect(state: Walk) -> None:
        del state.stack[len(state.stack) - count :]
        state.stack.append(1)

    return effect


def _big(size: int) -> Effect:
    def effect(state: Walk) -> None:
        state.stack.append(1 + state.number(size) // 9)

    return effect


def _line_number(state: Walk) -> None:
    digits = state.data.find(b"\n", state.at) - state.at
    state.stack.append(1 + digits // 20)


def _escaped_text(state: Walk) -> None:
    line = state.data[state.at : state.data.find(b"\n", state.at)]
    if b"\\ud" in line.lower():
        raise state.fail("holds text with half of a surrogate pair")
    state.stack.append(1)


def _mark(state: Walk) -> None:
    state.marks.append(len(state.stack))


def _tuple(state: Walk) -> None:
    state.stack.append(min(1 + sum(state.items()), _MOST))


def _short_tuple(count: int) -> Effect:
    def effect(state: Walk) -> None:
        items = [state.stack.pop() for _ in range(count)]
        state.stack.append(min(1 + sum(items), _MOST))

    return effect


def _list(state: Walk) -> None:
    state.items()
    state.stack.append(1)


def _dict(state: Walk) -> None:
    _keys(state, 2)
    state.stack.append(1)


def _frozen_set(state: Walk) -> None:
    items = state.items()
    for weight in items:
        state.key(weight)
    state.stack.append(min(1 + sum(items), _MOST))


def _keys(state: Walk, step: int) -> None:
    for weight in state.items()[::step]:
        if weight > 1:
            state.key(weight)


def _set_items(state: Walk) -> None:
    _keys(state, 2)
    state.stack[-1]


def _set_item(state: Walk) -> None:
    state.stack.pop()
    state.key(state.stack.pop())
    state.stack[-1]


def _add_items(state: Walk) -> None:
    _keys(state, 1)
    state.stack[-1]


def _append_all(state: Walk) -> None:
    state.items()
    state.stack[-1]


def _take(state: Walk) -> None:
    """One value goes into, or changes, the one below it."""
    state.stack.pop()
    state.stack[-1]


def _pop(state: Walk) -> None:
    if state.marks and state.marks[-1] == len(state.stack):
        state.marks.pop()
    else:
        state.stack.pop()


def _pop_mark(state: Walk) -> None:
    state.items()


def _duplicate(state: Walk) -> None:
    state.stack.append(state.stack[-1])


def _reduce(state: Walk) -> None:
    """A function's result may hold its arguments, as a torch.Size does."""
    arguments = state.stack.pop()
    state.stack[-1] = arguments


def _from_mark(state: Walk) -> None:
    state.items()
    state.stack.append(1)


def _put(size: int) -> Effect:
    def effect(state: Walk) -> None:
        index = state.number(size)
        if index > len(state.data):
            raise state.fail("requests more memory than the file's length")
        state.memo[index] = state.stack[-1]

    return effect


def _put_line(state: Walk) -> None:
    index = _index(state)
    if index > len(state.data):
        raise state.fail("requests more memory than the file's length")
    state.memo[index] = state.stack[-1]


def _get_line(state: Walk) -> None:
    state.stack.append(state.memo[_index(state)])


def _index(state: Walk) -> int:
    digits = state.data[state.at + 1 : state.data.find(b"\n", state.at)]
    if not digits.isdigit() or len(digits) > 12:
        raise state.fail("has no memo index")
    return int(digits)


def _memoize(state: Walk) -> None:
    state.memo[len(state.memo)] = state.stack[-1]


def _long_get(state: Walk) -> None:
    state.stack.append(state.memo[state.number(4)])


# The opcodes that `walk` does not handle itself. BUILD (b) and APPEND (a) take one value; \x81 is NEWOBJ, \x92 NEWOBJ_EX.
_EFFECTS: dict[int, Effect] = {
    **dict.fromkeys(b"XSTUBFPc\x8c\x8d\x8e\x96\x82\x83\x84", _push),
    **dict.fromkeys(b"\x80\x95\x98", _nothing),
    **dict.fromkeys(b"ab", _take),
    ord("C"): _push, ord("I"): _line_number, ord("L"): _line_number, ord("V"): _escaped_text,
    0x8A: _big(1), 0x8B: _big(4), ord("("): _mark, ord("t"): _tuple, ord("l"): _list, ord("d"): _dict,
    0x85: _short_tuple(1), 0x86: _short_tuple(2), 0x87: _short_tuple(3), 0x91: _frozen_set,
    ord("e"): _append_all, ord("u"): _set_items, ord("s"): _set_item, 0x90: _add_items,
    ord("0"): _pop, ord("1"): _pop_mark, ord("2"): _duplicate, ord("R"): _reduce,
    ord("Q"): _replace(1), 0x93: _replace(2), 0x81: _replace(2), 0x92: _replace(3), ord("i"): _from_mark, ord("o"): _from_mark,
    ord("q"): _put(1), ord("r"): _put(4), ord("p"): _put_line, ord("g"): _get_line, 0x94: _memoize, ord("j"): _long_get,
}  # fmt: skip
