"""Check that tensors make up a model, before a byte is moved: names, shapes, dtypes and the tied head."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from titan_ckpt.converters.models.families import EMBEDDING, HEAD, copies, expected_tensors
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.converters.models.transforms import FLOATS
from titan_ckpt.errors import LoadContractError
from titan_ckpt.sharding.placement import Shape

log = logging.getLogger(__name__)
# Ends of the names of quantised tensors, and the methods that write them.
_QUANTISED = (
    ((".qweight", ".qzeros", ".g_idx", ".scales"), "GPTQ or AWQ"),
    ((".SCB", ".weight_format", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"), "bitsandbytes"),
    ((".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), "bitsandbytes"),
    (
        (".weight_packed", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
        "compressed-tensors",
    ),
    (
        (".weight_scale", ".weight_scale_inv", ".input_scale", ".weight_scale_2", ".k_scale", ".v_scale"),
        "FP8 or INT8 with scales",
    ),
    (("_blocks", "_scales"), "MXFP4"),
    ((".W_q", ".codes", ".codebooks", ".biases", ".weight._data", ".weight._scale"), "a quantisation library"),
)


def check_tensors(found: Mapping[str, Shape], spec: ModelSpec, *, where: str) -> None:
    """LoadContractError that lists missing, extra and misshaped tensors (Hugging Face's names).

    `copies` are allowed, such as a head beside a tied embedding; the caller compares their bytes.
    """
    required, allowed = expected_tensors(spec), copies(spec)
    expected = required | {name: required[original] for name, original in allowed.items()}
    missing = [name for name in required if name not in found]
    extra = [name for name in found if name not in expected]
    problems = [f"missing {_some(missing)}"] if missing else []
    problems += [f"not part of a {spec.family} model of this config: {_some(extra)}"] if extra else []
    if method := next((method for name in extra for ends, method in _QUANTISED if name.endswith(ends)), None):
        problems.append(f"these are quantised weights ({method}); convert the model that they were made from")
    wrong = [name for name in expected if name in found and tuple(found[name]) != expected[name]]
    problems += [_shape_problem(name, tuple(found[name]), expected[name]) for name in wrong[:3]]
    problems += [f"and {len(wrong) - 3} more of another shape"] if len(wrong) > 3 else []
    if problems:
        raise LoadContractError(f"{where}: weights and config contradict each other: {'; '.join(problems)}")


def check_floats(dtypes: Mapping[str, str], *, where: str) -> None:
    """LoadContractError for weights (name -> dtype) that are not floating-point: quantised, they mean other values."""
    wrong = [f"{name} is {dtype}" for name, dtype in dtypes.items() if dtype not in FLOATS]
    if wrong:
        raise LoadContractError(
            f"{where}: weights and config contradict each other: {_some(wrong)}, expected floating point: quantised weights? "
            "Convert the model that they were made from"
        )


def warn_of_other_dtypes(dtypes: Collection[str], declared: str | None, *, where: str) -> None:
    """Warn of weights in other dtypes than their config declares: none of them has it, or they are float8 without scales."""
    narrow = sorted({dtype for dtype in dtypes if dtype.startswith("float8") and dtype != declared})
    if narrow or (declared is not None and dtypes and declared not in dtypes):
        found = narrow or sorted(set(dtypes))
        log.warning("%s: the config says %s, weights are %s; they are taken as they are", where, declared, _some(found))


def check_dtypes(parts: Iterable[tuple[str, str]], *, where: str) -> None:
    """LoadContractError if the parts (name of the whole, dtype) of a stacked tensor have different dtypes."""
    dtypes: dict[str, str] = {}
    for name, dtype in parts:
        if dtypes.setdefault(name, dtype) != dtype:
            raise LoadContractError(
                f"{where}: the parts of {name} are {dtypes[name]} and {dtype}; give --dtype to stack them"
            )


def main_dtype(sizes: Iterable[tuple[str, int]]) -> str:
    """The floating-point dtype with the most bytes; `sizes` has (dtype, bytes) of each tensor."""
    totals: Counter[str] = Counter()
    for dtype, size_bytes in sizes:
        totals[dtype] += size_bytes
    return max(totals, key=lambda dtype: (dtype in FLOATS, totals[dtype]))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def _shape_problem(name: str, found: Shape, expected: Shape) -> str:
    hint = " (transposed?)" if found == expected[::-1] else ""
    if not hint and len(found) == len(expected) and found[1:] == expected[1:] and name in (EMBEDDING, HEAD):
        hint = f" (vocabulary padded? the config's is {expected[0]})"
    return f"{name} has shape {found}, the config wants {expected}{hint}"
