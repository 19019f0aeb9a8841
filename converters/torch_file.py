"""Convert plain torch files (`.pt`, `.pth`, `.bin`; one pickled state dict, weights-only) to and from checkpoints.

The whole file is held in memory (mapped if torch can), so this does not suit large models.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import torch

from titan_ckpt.arguments import OnProgress, ignore_progress
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.foreign_files import check_own_files
from titan_ckpt.checkpoint.objects import read_object
from titan_ckpt.checkpoint.open import as_checkpoint, open_checkpoint
from titan_ckpt.checkpoint.unflattened import warn_of_text
from titan_ckpt.errors import (
    AlreadyExistsError,
    ConditionFailedError,
    DamagedError,
    NotFoundError,
    TitanError,
    UnsafeContentError,
    UsageError,
)
from titan_ckpt.format.commit import find_commit
from titan_ckpt.location import StrPath, local_path, normalise, parse_location, redact, scheme, url_text
from titan_ckpt.parsing.torch_archive import check_torch_file
from titan_ckpt.saving.saver import SaveHandle, Saver
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

LOOK_S = 0.2
FREE_VALUES, FREE_BYTES, MAX_GROWTH = 10_000, 64 << 20, 16
_GLOBAL = re.compile(r"\bGLOBAL ([\w.<>]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReport:
    """Result of a conversion."""

    url: str
    num_tensors: int
    num_values: int
    size_bytes: int


def import_torch(
    src: StrPath, dst: StrPath, *, under: str = "", on_progress: OnProgress = ignore_progress
) -> TorchReport:
    """Write the state dict in the file `src` as checkpoint `dst` (`URL[@STEP]`, step 0 if none is given).

    Only tensors and plain data are read: UnsafeContentError for any other content. Dtypes are kept; nested names are joined with
    dots. `under` prefixes all names (`model` for a bare state dict with Hugging Face's names). `on_progress` hears how many bytes
    of how many are written.
    """
    content = _read(url_text(src))
    state = {under: content} if under else content
    location = parse_location(dst)
    store, step = open_store(location.url), location.step or 0
    if find_commit(store, step) is not None:
        raise AlreadyExistsError(f"{store}@{step} is committed already; give another run, or a step as URL@STEP")
    with Saver(store) as saver:
        _wait(saver, saver.save(state, step=step, kind="model"), _num_bytes(content), on_progress)
    manifest = open_checkpoint(location.url, step=step, store=store).manifest
    return TorchReport(
        url=f"{store}@{step}",
        num_tensors=len(manifest.tensors),
        num_values=len(manifest.objects),
        size_bytes=manifest.size_bytes,
    )


def _wait(saver: Saver, handle: SaveHandle, size_bytes: int, on_progress: OnProgress) -> None:
    while not handle.future.done():
        wait([handle.future], timeout=LOOK_S)
        on_progress(min(saver.metrics().uploaded_bytes, size_bytes), size_bytes)
    handle.wait()


def _num_bytes(value: Any) -> int:
    """Bytes of all tensors in nested values."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_num_bytes, inner))


def export_torch(
    checkpoint: Checkpoint | StrPath,
    dst: StrPath,
    *,
    only: str = "",
    on_progress: OnProgress = ignore_progress,
) -> TorchReport:
    """Write a checkpoint as one torch file `dst`, a flat dict that `torch.load(weights_only=True)` reads.

    `only` keeps the names below this prefix and strips it: `model` gives what `module.load_state_dict` takes. `on_progress` hears
    how many bytes of how many are read.
    """
    opened = as_checkpoint(checkpoint)
    store, name = _store_and_name(url_text(dst))
    if store.exists(name):
        raise AlreadyExistsError(f"{store.where(name)}: exists already; give another name or remove it first")
    prefix = f"{only}." if only else ""
    tensors = {fqn.removeprefix(prefix): fqn for fqn in opened.manifest.by_fqn if fqn.startswith(prefix)}
    values = {fqn.removeprefix(prefix): fqn for fqn in opened.manifest.objects_by_fqn if fqn.startswith(prefix)}
    if not tensors and not values:
        raise NotFoundError(f"{opened}: nothing below {only!r}")
    sizes = {key: opened.manifest.by_fqn[fqn].size_bytes for key, fqn in tensors.items()}
    state: dict[str, Any] = {}
    size_bytes, done = sum(sizes.values()), 0
    for key, fqn in tensors.items():
        state[key] = opened.read(fqn)
        done += sizes[key]
        on_progress(done, size_bytes)
    state |= {key: read_object(opened, fqn) for key, fqn in values.items()}
    warn_of_text(opened, state, prefix)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        store.write_if(name, buffer.getbuffer(), version=None)
    except ConditionFailedError as error:
        raise AlreadyExistsError(
            f"{store.where(name)}: exists already; give another name or remove it first"
        ) from error
    return TorchReport(url=url_text(dst), num_tensors=len(tensors), num_values=len(values), size_bytes=size_bytes)


def _store_and_name(url: str) -> tuple[Store, str]:
    """The store of the folder that holds file `url`, and the file's name. UsageError if no store can be there."""
    folder, _, name = normalise(url).rpartition("/")
    if scheme(folder) == "file" and os.path.isfile(local_path(folder)):
        raise UsageError(f"{url}: {local_path(folder)} is a file, not a folder; give another name")
    try:
        return open_store(folder), name
    except UsageError as error:
        raise UsageError(f"{redact(url)}: {error}") from error


def _read(src: str) -> Mapping[str, Any]:
    try:
        if scheme(src) == "file":
            path = local_path(normalise(src))
            folder, _, name = path.rpartition("/")
            check_own_files(open_store(folder or "/"), [name])
            if not os.path.isfile(path):
                raise NotFoundError(f"{path}: no such file")
            with open(path, "rb") as file:
                check_torch_file(file, where=src)
            state, size_bytes = torch.load(path, map_location="cpu", weights_only=True), os.path.getsize(path)
        else:
            store, name = _store_and_name(src)
            content = io.BytesIO(store.read(name))
            check_torch_file(content, where=src)
            content.seek(0)
            state, size_bytes = torch.load(content, map_location="cpu", weights_only=True), content.getbuffer().nbytes
    except TitanError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeContentError(f"{src}: {_unsafe(str(error))}; it was not loaded") from error
    except Exception as error:  # torch's reader raises whatever the call that a broken pickle names does
        raise DamagedError(f"{src}: not a whole torch file: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(state, Mapping) or not state:
        raise DamagedError(f"{src}: holds a {type(state).__name__}, not a state dict")
    _check_size(state, size_bytes, src)
    return state


def _unsafe(text: str) -> str:
    """What torch's weights-only reader found, as it says in one of many lines."""
    found = _GLOBAL.search(text)
    if found is None:
        return "holds more than tensors and plain data, or is no torch file"
    return f"holds {found[1][:200]}, and only tensors and plain data are read; save the state_dict() of a model or optimizer"


def _check_size(state: Mapping[str, Any], size_bytes: int, src: str) -> None:
    """Refuse a state that a few bytes make large: strides of 0, views and lists that the file stores once and names often."""
    values, tensors = FREE_VALUES + size_bytes, FREE_BYTES + MAX_GROWTH * size_bytes
    inside: list[Any] = [state]
    while inside:
        value = inside.pop()
        values -= 1
        if isinstance(value, torch.Tensor):
            tensors -= _stored_bytes(value, src)
        elif isinstance(value, str | bytes | bytearray):
            values -= len(value)
        elif isinstance(value, Mapping):
            inside += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            inside += value
        if values < len(inside) or tensors < 0:
            raise DamagedError(
                f"{src}: {size_bytes} bytes stand for a state of more than {MAX_GROWTH} times their size: "
                "lists or tensors that are stored once and used often. Nothing was written; save the state anew with torch.save"
            )


def _stored_bytes(tensor: torch.Tensor, src: str) -> int:
    """Bytes of a tensor once it is written; DamagedError for one that has more elements than its storage."""
    if tensor.layout != torch.strided or tensor.is_meta:
        raise DamagedError(
            f"{src}: a tensor of layout {tensor.layout} on {tensor.device}; only dense ones can be converted"
        )
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes > tensor.untyped_storage().nbytes():
        raise DamagedError(
            f"{src}: a tensor of shape {tuple(tensor.shape)} needs {size_bytes} bytes, but the file stores "
            f"{tensor.untyped_storage().nbytes()} for it (strides {tensor.stride()}); save it with .contiguous()"
        )
    return size_bytes


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
