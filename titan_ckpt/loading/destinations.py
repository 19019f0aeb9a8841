"""Which tensors a load can fill: those with writable memory of their own, or memory shared with an equal value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations, pairwise

import torch

from titan_ckpt.state.state_dict import detached_shard

_MAPS = "/proc/self/maps"
MOST_ENUMERATED = 1 << 24


def destination_problems(
    tensors: Mapping[str, torch.Tensor], have_equal_values: Callable[[str, str], bool]
) -> list[str]:
    """Why these tensors cannot be filled, one line each, by name.

    `have_equal_values(a, b)` is asked of two names that are the same memory, such as tied weights: then both must be stored with
    equal values.
    """
    found: list[str] = []
    usable: dict[str, torch.Tensor] = {}
    read_only = _read_only_memory()
    for fqn, tensor in tensors.items():
        local = detached_shard(tensor)
        problem = _problem(local, read_only)
        if problem is not None:
            found.append(f"{fqn}: {problem}")
        elif local.numel():
            usable[fqn] = local
    return found + list(_shared_memory(usable, have_equal_values))


def _problem(local: torch.Tensor, read_only: list[tuple[int, int]]) -> str | None:
    if local.is_meta or type(local).__name__ == "FakeTensor":
        return "is on the meta device, without memory to load into; give it some first: module.to_empty(device=...)"
    if has_shared_elements(local):
        return (
            f"its elements share memory (shape {tuple(local.shape)}, strides {local.stride()}), as after expand(); load into a "
            f"clone() of it"
        )
    if local.device.type == "cpu" and local.numel():
        start = local.data_ptr()
        if any(low <= start < high for low, high in read_only):
            return "its memory is mapped read-only; load into a clone() of it"
    return None


def has_shared_elements(local: torch.Tensor) -> bool:
    """Whether two elements are the same memory. Dimensions that nest settle nearly all; the others are enumerated."""
    reach, is_nested = 0, True
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1:
            is_nested = is_nested and stride > reach
            reach += stride * (size - 1)
    if is_nested or not local.numel():
        return False
    if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        return True
    places = torch.zeros((), dtype=torch.int64, device="cpu")
    for stride, size in zip(local.stride(), local.shape, strict=True):
        places = places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return local.numel() > MOST_ENUMERATED or len(torch.unique(places)) < local.numel()


def _shared_memory(tensors: Mapping[str, torch.Tensor], have_equal_values: Callable[[str, str], bool]) -> Iterable[str]:
    by_storage: dict[int, list[str]] = {}
    for fqn, local in tensors.items():
        by_storage.setdefault(local.untyped_storage().data_ptr(), []).append(fqn)
    for fqns in by_storage.values():
        distinct: dict[tuple[object, ...], str] = {}
        for fqn in fqns:
            local = tensors[fqn]
            view = (local.data_ptr(), local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg())
            first = distinct.setdefault(view, fqn)
            if first != fqn and not have_equal_values(first, fqn):
                yield f"{fqn}: is the same memory as {first}, but the checkpoint has another value for it"
        for a, b in _overlapping({fqn: tensors[fqn] for fqn in distinct.values()}):
            yield f"{b}: shares memory with {a}, so that one load would overwrite the other; load into a clone() of one"


def _overlapping(views: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, str]]:
    """Pairs of views of one storage with a common element; disjoint columns of one matrix have none."""
    spans = sorted((*_span(local), fqn) for fqn, local in views.items())
    if all(end <= start for (_, end, _), (start, _, _) in pairwise(spans)):
        return
    for (a_start, a_end, a), (b_start, b_end, b) in combinations(spans, 2):
        if b_start < a_end and a_start < b_end and _have_common_bytes(views[a], views[b], a_start, max(a_end, b_end)):
            yield a, b


def _span(local: torch.Tensor) -> tuple[int, int]:
    """First and last byte + 1 of a view's memory."""
    reach = sum(stride * (size - 1) for stride, size in zip(local.stride(), local.shape, strict=True))
    return local.data_ptr(), local.data_ptr() + (reach + 1) * local.element_size()


def _have_common_bytes(a: torch.Tensor, b: torch.Tensor, start: int, end: int) -> bool:
    if a.element_size() != b.element_size() or (a.data_ptr() - b.data_ptr()) % a.element_size():
        return True
    marks = torch.zeros((end - start) // a.element_size(), dtype=torch.int8, device="cpu")
    for view in (a, b):
        offset = (view.data_ptr() - start) // view.element_size()
        marks.as_strided(view.shape, view.stride(), offset).add_(1)
    return bool((marks > 1).any())


def _read_only_memory() -> list[tuple[int, int]]:
    """Address ranges that this process cannot write; known on Linux only."""
    if sys.platform != "linux":
        return []
    ranges = []
    try:
        with open(_MAPS, encoding="utf-8", errors="replace") as file:
            for line in file:
                addresses, rights = line.split(maxsplit=2)[:2]
                if "w" not in rights:
                    low, _, high = addresses.partition("-")
                    ranges.append((int(low, 16), int(high, 16)))
    except OSError:
        return []
    return ranges
