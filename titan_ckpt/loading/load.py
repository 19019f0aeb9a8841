"""Loading: ranged reads straight into the destination tensors, from any mesh to any mesh, with strict checks."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.kinds import Choice
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import DamagedError, LoadContractError, NotFoundError, UnsafeContentError
from titan_ckpt.format.codec import PLANES_ZSTD, EncodedPayload, read_raw
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import RAW, Chunk, TensorEntry
from titan_ckpt.format.torch_archive import check_torch_file
from titan_ckpt.loading.broadcast import is_reader, read_and_send
from titan_ckpt.loading.requests import Request, fetch, grouped
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.state.state_dict import DTYPE_NAME, TORCH_DTYPE, as_bytes, detached_shard, flatten, local_shard

log = logging.getLogger(__name__)


class OnMismatch(Choice):
    """What to do with a difference between checkpoint and state."""

    ERROR = "error"
    WARN = "warn"
    ALLOW = "allow"


class VerifyReads(Choice):
    """Which digests to check: of chunks that are read whole, of all (reading them whole), or none."""

    READ = "read"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPolicy:
    """What to do if checkpoint and state differ: "error", "warn" or "allow". A different global shape is always an error.

    `missing`: names that only the state has. `extra`: names that only the checkpoint has, below the state's own top-level names.
    `cast`: a dtype that can represent every stored value; `lossy_cast`: one that may not.
    `verify="read"` checks the digest of every chunk that is read whole; "all" reads every chunk whole; "none" checks nothing.
    `broadcast` reads once for all replicas along `dp_replicate` and sends the bytes between ranks; then all ranks must load.
    UsageError for any other word.
    """

    missing: OnMismatch | str = OnMismatch.ERROR
    extra: OnMismatch | str = OnMismatch.ERROR
    cast: OnMismatch | str = OnMismatch.ERROR
    lossy_cast: OnMismatch | str = OnMismatch.ERROR
    verify: VerifyReads | str = VerifyReads.READ
    broadcast: bool = False
    threads: int = 8

    def __post_init__(self) -> None:
        for name in ("missing", "extra", "cast", "lossy_cast"):
            object.__setattr__(self, name, OnMismatch.parse(getattr(self, name), name))
        object.__setattr__(self, "verify", VerifyReads.parse(self.verify, "verify"))


@dataclass(slots=True)
class LoadReport:
    """What a load did on this rank, by name; `objects` are the values that are not tensors.

    `needed_bytes` is the size of the tensors, `fetched_bytes` what was read for them, `unverified_bytes` the part of the needed
    bytes whose digest was not checked, because their chunks were read in part.
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    cast: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    needed_bytes: int = 0
    fetched_bytes: int = 0
    unverified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of a stored tensor within one chunk, and the tensor to fill."""

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: torch.Tensor


def load(
    checkpoint: Checkpoint | str, state: MutableMapping[str, Any], *, policy: LoadPolicy | None = None
) -> LoadReport:
    """Fill the tensors of `state` in place and replace its other values; each rank reads only its own shards.

    `state` is nested mappings of tensors and plain values, as `Saver.save` takes them; keys joined by dots are the names in the
    checkpoint, and a DTensor, on any mesh, gets this rank's shard. Ranks need not load together unless the policy broadcasts.
    A URL opens the newest whole checkpoint, `URL@STEP` that step.

    LoadContractError, before anything is read, for a difference that `policy` does not allow. DamagedError if stored bytes differ
    from what was saved; the contents of the tensors are then undefined.
    """
    checkpoint = open_checkpoint(checkpoint) if isinstance(checkpoint, str) else checkpoint
    policy = policy or LoadPolicy()
    flat = flatten(state)
    report = LoadReport()
    _apply_contract(checkpoint, flat.tensors, flat.objects, policy, report)
    plan = ReadPlan(checkpoint, policy, report)
    wanted = {fqn: flat.tensors[fqn] for fqn in report.loaded if fqn in flat.tensors}
    for fqn, tensor in wanted.items():
        if not policy.broadcast or is_reader(tensor):
            plan.add(checkpoint.manifest.by_fqn[fqn], tensor)
    if policy.broadcast:
        read_and_send(wanted, plan.run)
    else:
        plan.run()
    for fqn in flat.objects:
        if fqn in checkpoint.manifest.objects_by_fqn:
            report.objects[fqn] = read_object(checkpoint, fqn)
            _replace(state, flat.paths[fqn], report.objects[fqn])
    return report


def read_tensor(checkpoint: Checkpoint, fqn: str, box: Box | None = None) -> torch.Tensor:
    """Read a tensor, or `box` of it, into CPU memory; verifies every chunk it touches. NotFoundError for an unknown name."""
    entry = checkpoint.manifest.by_fqn.get(fqn)
    if entry is None:
        raise NotFoundError(f"{checkpoint}: no tensor {fqn!r}; `titan-ckpt inspect` lists them")
    box = box or Box.whole(entry.global_shape)
    tensor = torch.empty(box.sizes, dtype=TORCH_DTYPE[entry.dtype])
    plan = ReadPlan(checkpoint, LoadPolicy(verify=VerifyReads.ALL), LoadReport())
    plan.add_box(entry, box, tensor)
    plan.run()
    return tensor


def read_object(checkpoint: Checkpoint, fqn: str) -> Any:
    """Unpickle a non-tensor value by torch's weights-only rules. UnsafeContentError for a blob that needs code to run."""
    data = read_object_bytes(checkpoint, fqn)
    check_torch_file(io.BytesIO(data), where=f"{checkpoint}: value {fqn!r}")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeContentError(
            f"{checkpoint}: value {fqn!r} holds more than plain data; it was not loaded. {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:
        raise DamagedError(f"{checkpoint}: value {fqn!r}: not a value that torch.save wrote: {error}") from error


def read_object_bytes(checkpoint: Checkpoint, fqn: str) -> bytes:
    """The verified blob of a non-tensor value."""
    entry = checkpoint.manifest.objects_by_fqn.get(fqn)
    if entry is None:
        raise NotFoundError(f"{checkpoint}: no value {fqn!r}")
    path = checkpoint.path(entry.file)
    data = checkpoint.store.read(path, entry.offset, entry.length)
    if entry.digest is not None and digest(data) != entry.digest:
        raise DamagedError(_damage(checkpoint, path, fqn, entry.offset, entry.length))
    return data


def _damage(checkpoint: Checkpoint, path: str, fqn: str, start: int, length: int) -> str:
    return (
        f"{checkpoint.store.where(path)}: {fqn}: bytes {start} to {start + length} are not what was saved (digest differs); "
        f"`titan-ckpt verify --data` lists all damage"
    )


def _replace(state: MutableMapping[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


def _apply_contract(
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, Any],
    policy: LoadPolicy,
    report: LoadReport,
) -> None:
    """Sort every name into the report, then raise one error for all differences that the policy forbids."""
    stored = checkpoint.manifest
    errors: list[str] = []
    for fqn, tensor in tensors.items():
        entry = stored.by_fqn.get(fqn)
        if entry is None:
            report.missing.append(fqn)
        elif entry.global_shape != tuple(tensor.shape):
            errors.append(f"{fqn}: checkpoint has global shape {entry.global_shape}, model wants {tuple(tensor.shape)}")
        else:
            report.loaded.append(fqn)
            _judge_dtype(fqn, entry.dtype, tensor.dtype, policy, report, errors)
    for fqn in objects:
        (report.loaded if fqn in stored.objects_by_fqn else report.missing).append(fqn)
    tops = {fqn.partition(".")[0] for fqn in [*tensors, *objects]}
    wanted = {*tensors, *objects}
    names = [*stored.by_fqn, *stored.objects_by_fqn]
    report.extra.extend(fqn for fqn in names if fqn.partition(".")[0] in tops and fqn not in wanted)
    _judge(policy.missing, "missing from the checkpoint", report.missing, errors)
    _judge(policy.extra, "in the checkpoint but not in the state", report.extra, errors)
    if errors:
        shown = "\n  ".join(errors[:20]) + (f"\n  ... and {len(errors) - 20} more" if len(errors) > 20 else "")
        raise LoadContractError(f"{checkpoint} does not fit the state:\n  {shown}")


def _judge(answer: str, what: str, fqns: list[str], errors: list[str]) -> None:
    if not fqns or answer == OnMismatch.ALLOW:
        return
    if answer == OnMismatch.ERROR:
        errors.extend(f"{fqn}: {what}" for fqn in fqns)
    else:
        log.warning("%d entries are %s: %s", len(fqns), what, ", ".join(fqns[:10]))


def _judge_dtype(
    fqn: str, stored: str, wanted: torch.dtype, policy: LoadPolicy, report: LoadReport, errors: list[str]
) -> None:
    if TORCH_DTYPE[stored] == wanted:
        return
    is_exact = torch.promote_types(TORCH_DTYPE[stored], wanted) == wanted
    text = f"{stored} -> {DTYPE_NAME.get(wanted, str(wanted))}"
    report.cast[fqn] = text
    answer = policy.cast if is_exact else policy.lossy_cast
    _judge(answer, f"{text} {'changes the dtype' if is_exact else 'may lose precision'}", [fqn], errors)


class ReadPlan:
    """Plans and runs the reads that fill some tensors."""

    def __init__(self, checkpoint: Checkpoint, policy: LoadPolicy, report: LoadReport) -> None:
        checkpoint.prove_coverage()
        self._checkpoint, self._policy, self._report = checkpoint, policy, report
        self._regions: list[_Region] = []
        self._reads: list[Request] = []
        self._afterwards: list[Callable[[], None]] = []

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of `tensor`."""
        self.add_local(entry, local_shard(entry.fqn, tensor).box, detached_shard(tensor))

    def add_local(self, entry: TensorEntry, box: Box, local: torch.Tensor) -> None:
        """Fill `local`, which is `box` of the stored tensor, on any device and in any dtype and layout."""
        if local.is_contiguous() and local.device.type == "cpu" and local.dtype == TORCH_DTYPE[entry.dtype]:
            self.add_box(entry, box, local)
            return
        copy = torch.empty(box.sizes, dtype=TORCH_DTYPE[entry.dtype], pin_memory=local.is_cuda)
        self.add_box(entry, box, copy)
        self._afterwards.append(lambda: _copy_into(local, copy))

    def add_box(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Fill the contiguous CPU tensor `target`, which is `box` of the stored tensor."""
        if box.num_elements == 0:
            return
        for chunk in self._checkpoint.manifest.chunks_touching(entry, box):
            part = chunk.box.intersect(box)
            if part is not None:
                self._regions.append(_Region(entry, chunk, part, _narrow(target, part.relative_to(box))))

    def _located(self, pool: ThreadPoolExecutor) -> Iterable[Chunk]:
        """The regions' chunks with payload offsets. In foreign blobs that takes small reads, which run in parallel."""
        chunks = [region.chunk for region in self._regions]
        if all(chunk.payload_offset >= 0 for chunk in chunks):
            return chunks
        return pool.map(partial(self._checkpoint.locate, row_major=False), chunks)

    def _add_chunk(self, region: _Region, chunk: Chunk) -> None:
        """Plan the read of a region from its chunk, whose payload offset is known."""
        entry, part, view = region.entry, region.box, region.target
        inner = part.relative_to(chunk.box)
        needs_whole = self._policy.verify == VerifyReads.ALL and part != chunk.box
        inner_read = Box.whole(chunk.box.sizes) if needs_whole else inner
        size = view.element_size()
        strides = chunk.strides or row_major(chunk.box.sizes)
        first, last = _span(inner_read, strides)
        expected = self._digest(chunk, entry) if inner_read.sizes == chunk.box.sizes else None
        path, payload = self._checkpoint.path(chunk.file), chunk.offset + chunk.payload_offset
        start = payload + (first * size if chunk.codec == RAW else 0)
        is_straight = chunk.strides is None and view.is_contiguous() and (last - first) == inner.num_elements

        def finish(data: memoryview) -> None:
            if expected is not None and digest(data) != expected:
                raise DamagedError(_damage(self._checkpoint, path, chunk.fqn, start, len(data)))
            if not is_straight:
                _copy_box(data, inner, first, strides, view)

        self._count(part, size, (last - first) * size, is_verified=expected is not None)
        memory = as_bytes(view) if is_straight else None
        length, source = (last - first) * size, None
        if chunk.codec == PLANES_ZSTD:
            encoded = EncodedPayload(
                path=path,
                start=payload,
                length=chunk.payload_length,
                raw_length=chunk.box.num_elements * size,
                itemsize=size,
            )
            source = partial(read_raw, self._checkpoint.store, encoded, first * size)
        self._reads.append(Request(path=path, start=start, length=length, target=memory, done=finish, source=source))

    def _count(self, part: Box, size: int, fetched: int, *, is_verified: bool) -> None:
        self._report.needed_bytes += part.num_elements * size
        self._report.fetched_bytes += fetched
        if not is_verified:
            self._report.unverified_bytes += part.num_elements * size

    def _digest(self, chunk: Chunk, entry: TensorEntry) -> bytes | None:
        return None if self._policy.verify == VerifyReads.NONE else self._checkpoint.digest_of(entry, chunk)

    def run(self) -> None:
        """Read everything in parallel; stops at the first error."""
        store = self._checkpoint.store
        with ThreadPoolExecutor(max_workers=self._policy.threads, thread_name_prefix="titan-ckpt-load") as pool:
            for region, chunk in zip(self._regions, self._located(pool), strict=True):
                self._add_chunk(region, chunk)
            futures = [pool.submit(fetch, store, group) for group in grouped(self._reads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for action in self._afterwards:
            action()


def _span(inner: Box, strides: tuple[int, ...]) -> tuple[int, int]:
    """Element range [first, last) that covers the box `inner` of a chunk stored with `strides`."""
    first = sum(offset * stride for offset, stride in zip(inner.offsets, strides, strict=True))
    return first, first + sum((size - 1) * stride for size, stride in zip(inner.sizes, strides, strict=True)) + 1


def _narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def _copy_box(data: memoryview, inner: Box, first: int, strides: tuple[int, ...], view: torch.Tensor) -> None:
    """Copy the box `inner` of a chunk into `view`; `data` starts at element `first` of the chunk."""
    offset = sum(o * s for o, s in zip(inner.offsets, strides, strict=True)) - first
    flat = torch.frombuffer(data, dtype=view.dtype)
    view.copy_(flat.as_strided(inner.sizes, strides, storage_offset=offset))


def _copy_into(local: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        local.copy_(copy)


__all__ = [
    "LoadPolicy",
    "LoadReport",
    "ReadPlan",
    "load",
    "open_checkpoint",
    "read_object",
    "read_object_bytes",
    "read_tensor",
]
