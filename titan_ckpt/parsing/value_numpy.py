"""Constructors of numpy's arrays, scalars, dtypes and random generators (the pickles of numpy 1.26 to 2.4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.random  # the generators' classes are its attributes

from titan_ckpt.parsing.value_build import Builder, Constructor, only_args
from titan_ckpt.parsing.value_records import Record, is_name

_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_MODULES = {name: f"numpy.random._{name.lower().removesuffix('dxsm')}" for name in _GENERATORS}
_SCALARS = (
    "bool_", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "longdouble", "complex64", "complex128", "str_", "bytes_", "datetime64", "timedelta64", "void", "intp", "uintp",
)  # fmt: skip
_ARRAYS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray, ("numpy", "matrix"): np.matrix, ("numpy", "recarray"): np.recarray,
    ("numpy", "memmap"): np.memmap,  # without its file, as pickle gives it back
    **dict.fromkeys([("numpy.rec", "recarray"), ("numpy.core.records", "recarray")], np.recarray),
}  # fmt: skip
_TEXTS = (("numpy.char", "chararray"), ("numpy.core.defchararray", "chararray"))  # deprecated by numpy 2.5
_MAX_ITEM_BYTES = 1 << 20
_REFERENCES = 0x01 | 0x02 | 0x04  # NPY_ITEM_REFCOUNT, NPY_LIST_PICKLE, NPY_ITEM_IS_POINTER
_MAX_EMPTY_ITEMS = 1 << 16  # of no bytes each, which numpy widens to a character


def _dtype(builder: Builder, record: Record) -> np.dtype[Any]:
    """A dtype from its code, and for one of fields their names, dtypes and places."""
    code: Any = record.args[0]
    is_record = is_name(code) and code.call == ("numpy", "record")
    if not is_record and (is_name(code) or isinstance(code, Record)):
        whole: np.dtype[Any] = np.dtype(builder.value(code))
        return whole
    state: Any = builder.value(record.state[0]) if record.state else (0, "|", None, None, None)
    order, subarray, names, fields = state[1:5]
    if subarray is not None:
        base, shape = subarray
        if type(shape) is not tuple or not all(type(each) is int for each in shape):
            raise ValueError("a dtype whose shape is no shape")  # it could be other fields over the same bytes
        return np.dtype((base, shape))
    if names:
        placed = [fields[name] for name in names]
        formats, offsets = [each[0] for each in placed], [each[1] for each in placed]
        spec: Any = {"names": list(names), "formats": formats, "offsets": offsets, "itemsize": state[5]}
        if any(len(each) > 2 for each in placed):
            spec["titles"] = [each[2] if len(each) > 2 else None for each in placed]
        return _sized(np.dtype((np.record, spec) if is_record else spec))
    if code[0] in "mM" and len(state) > 8 and state[8] and state[8][1]:
        unit, count = state[8][1][:2]
        code = f"{code}[{count}{unit.decode() if isinstance(unit, bytes) else unit}]"
    found: Any = np.dtype(code)
    if found.char == "O":
        return np.dtype(object)
    ordered = found.newbyteorder(order) if order in "<>" else found
    return _sized(found if ordered == found else ordered)  # its own order by name is another dtype in its texts


def _string_dtype(coerce: int, *na_object: Any) -> np.dtype[Any]:
    """A `StringDType`; texts of any length."""
    if len(na_object) > 1 or not all(each is None or type(each) in (float, str) for each in na_object):
        raise ValueError("a StringDType with another na_object than None, a number or text")
    named = {"na_object": na_object[0]} if na_object else {}
    return np.dtypes.StringDType(coerce=bool(coerce), **named)


def _of_bytes(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """`dtype`, whose items are bytes and no references to memory."""
    if dtype.hasobject or dtype.flags & _REFERENCES:
        raise ValueError("the bytes of an array of Python objects or texts")
    return _sized(dtype)


def _sized(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.itemsize > _MAX_ITEM_BYTES:
        raise ValueError(f"a dtype of {dtype.itemsize} bytes")
    return dtype


def _array(builder: Builder, record: Record) -> Any:
    """An array: its record has only its class, the rest is its state."""
    _version, shape, dtype, is_column_major, raw = builder.value(record.state[0])
    if not isinstance(dtype, np.dtype):
        raise ValueError("an array without a dtype")
    kind = np.char.chararray if record.args[0].call in _TEXTS else _ARRAYS[record.args[0].call]
    if isinstance(raw, list) and (dtype.hasobject or dtype.flags & _REFERENCES):
        rows = _items(raw, dtype).reshape(shape)  # listed by rows in a column-major array, too
        return np.array(rows, order="F" if is_column_major else "C").view(kind)
    if not isinstance(raw, bytes):
        raise ValueError("not the bytes of an array")
    return _filled(shape, dtype, raw, is_column_major=is_column_major).view(kind)


def _filled(shape: Any, dtype: np.dtype[Any], raw: bytes, *, is_column_major: bool) -> Any:
    """A writable array of these bytes."""
    count = int(np.prod(shape, dtype=object))
    if _of_bytes(dtype).itemsize * count != len(raw) or (dtype.itemsize == 0 and count > _MAX_EMPTY_ITEMS):
        raise ValueError(f"an array of shape {shape} and {len(raw)} bytes")
    flat = np.frombuffer(raw, dtype=dtype, count=count) if raw else np.empty(shape, dtype=dtype)
    return flat.reshape(shape, order="F" if is_column_major else "C").copy(order="K")


def _masked(builder: Builder, record: Record) -> Any:
    """A masked array: its mask has a byte for each element, or for each field of one."""
    _version, shape, dtype, is_column_major, raw, mask, fill_value = builder.value(record.state[0])
    if not isinstance(dtype, np.dtype) or not isinstance(raw, bytes) or not isinstance(mask, bytes):
        raise ValueError("not the bytes of a masked array")
    data = _filled(shape, dtype, raw, is_column_major=is_column_major)
    flags = _filled(shape, np.ma.make_mask_descr(dtype), mask, is_column_major=is_column_major)
    return np.ma.array(data, mask=flags, fill_value=fill_value)


def _items(items: list[Any], dtype: np.dtype[Any]) -> Any:
    """Items that pickle lists one by one: objects, texts, and tuples for fields that hold some."""
    flat = np.empty(len(items), dtype=dtype)
    for place, item in enumerate(items):
        flat[place] = item
    return flat


def _scalar(builder: Builder, record: Record) -> Any:
    dtype, raw = builder.args(record)
    if isinstance(raw, np.ndarray) and raw.shape == () and raw.dtype == dtype and dtype.hasobject:
        return raw[()]
    if not isinstance(dtype, np.dtype) or not isinstance(raw, bytes) or len(raw) != _of_bytes(dtype).itemsize:
        raise ValueError("a number of another size")
    return np.frombuffer(raw, dtype=dtype)[0] if raw else dtype.type()


def _seed_sequence(builder: Builder, record: Record) -> np.random.SeedSequence:
    """A SeedSequence; Cython keeps its attributes in order of name."""
    state = builder.value(record.state[0]) if record.state else builder.args(record)[2]
    entropy, spawned, _pool, pool_size, spawn_key = state[:5]
    return np.random.SeedSequence(entropy, spawn_key=spawn_key, pool_size=pool_size, n_children_spawned=spawned)


def _bit_generator(builder: Builder, record: Record) -> Any:
    """A generator of random bits in its state."""
    name = record.args[0].call[1] if is_name(record.args[0]) else record.args[0]
    if name not in _GENERATORS:
        raise ValueError(f"an unknown generator {str(name)[:40]}")
    state = builder.value(record.state[0]) if record.state else builder.args(record)[1:]
    inner, seeds = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    kind = getattr(np.random, name)
    found = kind(seeds) if isinstance(seeds, np.random.SeedSequence) else kind()
    found.state = inner
    return found


def _generator(builder: Builder, record: Record) -> np.random.Generator:
    return np.random.Generator(_of_bits(builder, record))


def _of_bits(builder: Builder, record: Record) -> Any:
    found = builder.value(record.args[0]) if isinstance(record.args[0], Record) else None
    if not isinstance(found, np.random.BitGenerator):
        raise ValueError("without a generator of random bits")
    return found


def _random_state(builder: Builder, record: Record) -> np.random.RandomState:
    found = np.random.RandomState(_of_bits(builder, record))
    if record.state:
        found.set_state(builder.value(record.state[0]))
    return found


CONSTANTS: dict[tuple[str, str], Any] = {
    **{("numpy", name): getattr(np, name) for name in _SCALARS if hasattr(np, name)},
    **{(_MODULES[name], name): getattr(np.random, name) for name in _GENERATORS},
    ("numpy", "ndarray"): np.ndarray,
}
CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    ("numpy", "dtype"): _dtype,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _scalar for core in ("core", "_core")},
    ("numpy.ma.core", "_mareconstruct"): _masked,
    ("numpy._core._internal", "_convert_to_stringdtype_kwargs"): only_args(_string_dtype),
    ("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"): _seed_sequence,
    ("numpy.random._pickle", "__bit_generator_ctor"): _bit_generator,
    ("numpy.random._pickle", "__generator_ctor"): _generator,
    ("numpy.random._pickle", "__randomstate_ctor"): _random_state,
}
