"""Loading: ranged reads straight into the destination tensors, from any mesh to any mesh, with strict checks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.objects import damage
from titan_ckpt.checkpoint.open import as_checkpoint, open_checkpoint
from titan_ckpt.errors import DamagedError, LoadContractError, NotFoundError
from titan_ckpt.format.codec import PLANES_ZSTD, EncodedPayload, read_raw
from titan_ckpt.format.digest import matches
from titan_ckpt.format.manifest import RAW, Chunk, TensorEntry
from titan_ckpt.format.structure import owner_of
from titan_ckpt.loading.broadcast import failures_told, is_reader, run_together, send_to_replicas
from titan_ckpt.loading.casts import PAIRS, count_changed, holds_every_value
from titan_ckpt.loading.destinations import destination_problems
from titan_ckpt.loading.grow import grown
from titan_ckpt.loading.objects import read_objects, settle
from titan_ckpt.loading.policy import LoadPolicy, LoadReport, OnMismatch, VerifyReads
from titan_ckpt.loading.requests import Request, fetch, grouped
from titan_ckpt.loading.subclasses import mark_problems, spread, stored_marks
from titan_ckpt.location import StrPath
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.placement import strides as row_major
from titan_ckpt.state.flatten import FlatState, Names, flatten
from titan_ckpt.state.state_dict import (
    DTYPE_NAME,
    TORCH_DTYPE,
    as_bytes,
    detached_shard,
    has_part_of,
    local_shard,
)

log = logging.getLogger(__name__)
SHOWN = 20


@dataclass(frozen=True, slots=True)
class _Region:
    """A box of a stored tensor within one chunk, and the tensor to fill."""

    entry: TensorEntry
    chunk: Chunk
    box: Box
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class _StagedCopy:
    """Stored values in host memory, and the tensor of another dtype, layout or device that gets them."""

    fqn: str
    read: torch.Tensor
    target: torch.Tensor


def load(
    checkpoint: Checkpoint | StrPath,
    state: MutableMapping[str, Any],
    *,
    policy: LoadPolicy | None = None,
    prefix: str = "",
    storage_options: Mapping[str, Any] | None = None,
) -> LoadReport:
    """Fill the tensors of `state` in place and replace its other values; each rank reads only its own shards.

    `state` is nested mappings of tensors and plain values, as `Saver.save` takes them; keys joined by dots are the names in the
    checkpoint, after `prefix` and a dot if given; a DTensor, on any mesh, gets this rank's shard. An object with `state_dict` and
    `load_state_dict` (a module, an optimizer, a scheduler, a data loader) is filled through them; unless it is a module, it gets
    all that the checkpoint has for it. A URL opens the newest whole checkpoint, `URL@STEP` that step.

    LoadContractError for a difference that `policy` does not allow, and for a tensor that cannot be filled (on the meta device,
    expanded, sharing memory with one of another value), before any tensor changes. DamagedError if stored bytes differ from what
    was saved; the contents of the tensors are then undefined. CheckpointError on ranks where all is well if another one that
    shares a DTensor's mesh failed; a rank may load alone, but waits a while for the others (`LoadPolicy.together`).
    """
    with failures_told() as call:
        check_type(policy, "policy", LoadPolicy, or_none=True, hint="LoadPolicy(...)")
        policy = policy or LoadPolicy()
        state = {prefix: state} if prefix else state
        tensors = flatten(state).tensors if policy.together or policy.broadcast else {}
        fill = partial(_fill, checkpoint, storage_options, state, policy)
        report, flat = run_together(fill, tensors.values(), call=call, is_world=policy.broadcast)
    if policy.broadcast:
        send_to_replicas({fqn: flat.tensors[fqn] for fqn in report.loaded if fqn in flat.tensors})
    for fqn, value in report.objects.items():
        report.objects[fqn] = settle(flat.objects[fqn], value)
        flat.put(fqn, report.objects[fqn])
    flat.give_back()
    return report


def _fill(
    checkpoint: Checkpoint | StrPath,
    storage_options: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    policy: LoadPolicy,
) -> tuple[LoadReport, FlatState]:
    """Fill the tensors of `state` that this rank reads; the other values are in the report."""
    opened = as_checkpoint(checkpoint, storage_options)
    names = _names(opened)
    flat = grown(opened, flatten(state, stored=names), names)
    report, plan = _planned(opened, flat, policy)
    wanted = [name for name in report.loaded if name in flat.objects]
    report.objects.update(read_objects(opened, wanted, flat.objects, policy))
    plan.run()
    return report, flat


def _names(checkpoint: Checkpoint) -> Names:
    manifest = checkpoint.manifest
    return Names(values=manifest.objects_by_fqn, all=[*manifest.by_fqn, *manifest.objects_by_fqn])


def _planned(checkpoint: Checkpoint, flat: FlatState, policy: LoadPolicy) -> tuple[LoadReport, ReadPlan]:
    """Check everything that can be checked without the tensors' bytes, and plan this rank's reads."""
    report = LoadReport()
    marks = stored_marks(checkpoint, flat, policy)
    copies, problems = spread(checkpoint, flat, marks)
    _apply_contract(checkpoint, flat, policy, report, [*mark_problems(checkpoint, flat, marks), *problems], copies)
    plan = ReadPlan(checkpoint, policy, report)
    for fqn in report.loaded:
        tensor = flat.tensors.get(fqn)
        if tensor is not None and fqn in copies:
            plan.add_copy(fqn, copies[fqn], detached_shard(tensor))
        elif tensor is not None and has_part_of(tensor) and (not policy.broadcast or is_reader(tensor)):
            plan.add(checkpoint.manifest.by_fqn[fqn], tensor)
    return report, plan


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


def _apply_contract(
    checkpoint: Checkpoint,
    flat: FlatState,
    policy: LoadPolicy,
    report: LoadReport,
    errors: list[str],
    copies: Collection[str],
) -> None:
    """Sort every name into the report, then raise one error for all differences that the policy forbids, after `errors`.

    The shapes of `copies` need not be those in the checkpoint.
    """
    stored, tensors, objects = checkpoint.manifest, flat.tensors, {*flat.objects} - {*flat.marks}
    for fqn, tensor in tensors.items():
        entry = stored.by_fqn.get(fqn)
        if entry is None:
            report.missing.append(fqn)
        elif entry.global_shape != tuple(tensor.shape) and fqn not in copies:
            errors.append(f"{fqn}: checkpoint has global shape {entry.global_shape}, model wants {tuple(tensor.shape)}")
        else:
            report.loaded.append(fqn)
            _judge_dtype(fqn, entry.dtype, tensor.dtype, policy, report, errors)
    for fqn in [each for each in flat.objects if each in objects]:
        if fqn in flat.fixed and fqn in stored.objects_by_fqn:
            errors.append(f"{fqn}: is in a {flat.fixed[fqn]}, which cannot be changed")
        (report.loaded if fqn in stored.objects_by_fqn else report.missing).append(fqn)
    own = flat.root if isinstance(flat.root, Mapping) else {}  # names of containers without entries, too
    tops = {fqn.partition(".")[0] for fqn in [*tensors, *objects, *map(str, own)]}
    wanted = {*tensors, *flat.objects}
    made = {owner_of(name) for name in flat.marks}
    names = [fqn for fqn in [*stored.by_fqn, *stored.objects_by_fqn] if fqn not in wanted]
    report.extra.extend(fqn for fqn in names if fqn.partition(".")[0] in tops and fqn.rpartition(".")[0] not in made)
    fillable = {fqn: tensors[fqn] for fqn in report.loaded if fqn in tensors and has_part_of(tensors[fqn])}
    errors += destination_problems(fillable, partial(_have_equal_values, checkpoint, fillable))
    _judge(policy.missing, "missing from the checkpoint", report.missing, errors)
    _judge(policy.extra, "in the checkpoint but not in the state", report.extra, errors)
    if errors:
        raise LoadContractError(f"{checkpoint} does not fit the state:{_listed(errors)}")


def _listed(errors: list[str]) -> str:
    """The first errors, one a line."""
    more = [f"... and {len(errors) - SHOWN} more"] if len(errors) > SHOWN else []
    return "".join(f"\n  {line}" for line in [*errors[:SHOWN], *more])


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
    is_exact = holds_every_value(TORCH_DTYPE[stored], wanted)
    text = f"{stored} -> {DTYPE_NAME.get(wanted, str(wanted))}"
    report.cast[fqn] = text
    if PAIRS in (TORCH_DTYPE[stored], wanted):
        errors.append(f"{fqn}: {text} is not a cast: an element of float4_e2m1fn_x2 is two numbers")
    elif is_exact or _is_judged_by_values(policy):
        _judge(policy.cast, f"{text} changes the dtype", [fqn], errors)
    else:
        _judge(policy.lossy_cast, f"{text} may lose precision", [fqn], errors)


def _is_judged_by_values(policy: LoadPolicy) -> bool:
    """Whether a cast that may lose values is refused only if it does."""
    return policy.lossy_cast == OnMismatch.ERROR and policy.cast != OnMismatch.ERROR


def _have_equal_values(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], a: str, b: str) -> bool:
    """Whether two names whose tensors are the same memory are stored with equal values, on this rank's shard."""
    entries = [checkpoint.manifest.by_fqn[fqn] for fqn in (a, b)]
    boxes = [local_shard(fqn, tensors[fqn]).box for fqn in (a, b)]
    if entries[0].dtype != entries[1].dtype or boxes[0].sizes != boxes[1].sizes:
        return False
    found = [read_tensor(checkpoint, fqn, box) for fqn, box in zip((a, b), boxes, strict=True)]
    return bytes(as_bytes(found[0])) == bytes(as_bytes(found[1]))


class ReadPlan:
    """Plans and runs the reads that fill some tensors."""

    def __init__(self, checkpoint: Checkpoint, policy: LoadPolicy, report: LoadReport) -> None:
        checkpoint.prove_coverage()
        self._checkpoint, self._policy, self._report = checkpoint, policy, report
        self._direct: list[_Region] = []
        self._staged: list[_Region] = []
        self._copies: list[_StagedCopy] = []
        self._reads: list[Request] = []

    def add(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Fill this rank's shard of `tensor`."""
        self.add_local(entry, local_shard(entry.fqn, tensor).box, detached_shard(tensor))

    def add_local(self, entry: TensorEntry, box: Box, local: torch.Tensor) -> None:
        """Fill `local`, which is `box` of the stored tensor, on any device and in any dtype and layout."""
        if _is_direct(local, TORCH_DTYPE[entry.dtype]):
            self._add_regions(self._direct, entry, box, local)
            return
        copy = torch.empty(box.sizes, dtype=TORCH_DTYPE[entry.dtype], pin_memory=local.is_cuda)
        self._add_regions(self._staged, entry, box, copy)
        self._copies.append(_StagedCopy(entry.fqn, copy, local))

    def add_copy(self, fqn: str, value: torch.Tensor, local: torch.Tensor) -> None:
        """Fill `local` with a value that was read, when all is read."""
        self._copies.append(_StagedCopy(fqn, value.reshape(local.shape), local))

    def add_box(self, entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        """Fill the contiguous CPU tensor `target`, which is `box` of the stored tensor."""
        self._add_regions(self._direct, entry, box, target)

    def _add_regions(self, regions: list[_Region], entry: TensorEntry, box: Box, target: torch.Tensor) -> None:
        for chunk in self._checkpoint.manifest.chunks_touching(entry, box) if box.num_elements else ():
            part = chunk.box.intersect(box)
            if part is not None:
                regions.append(_Region(entry, chunk, part, _narrow(target, part.relative_to(box))))

    def _located(self, regions: list[_Region], pool: ThreadPoolExecutor) -> Iterable[Chunk]:
        """The regions' chunks with payload offsets. In foreign blobs that takes small reads, which run in parallel."""
        chunks = [region.chunk for region in regions]
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
            if expected is not None and not matches(data, expected):
                raise DamagedError(damage(self._checkpoint, path, chunk.fqn, start, len(data)))
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
        """Read everything in parallel; stops at the first error. Nothing is changed before every cast has been judged."""
        with ThreadPoolExecutor(max_workers=self._policy.threads, thread_name_prefix="titan-ckpt-load") as pool:
            self._read(self._staged, pool)
            if _is_judged_by_values(self._policy):
                self._judge_values()
            self._read(self._direct, pool)
        for copy in self._copies:
            _copy_into(copy.target, copy.read)

    def _read(self, regions: list[_Region], pool: ThreadPoolExecutor) -> None:
        self._reads = []
        for region, chunk in zip(regions, self._located(regions, pool), strict=True):
            self._add_chunk(region, chunk)
        futures = [pool.submit(fetch, self._checkpoint.store, group) for group in grouped(self._reads)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise

    def _judge_values(self) -> None:
        """LoadContractError for casts that would change values, before any destination is written."""
        lost = []
        for copy in self._copies:
            changed = count_changed(copy.read, copy.target.dtype)
            if changed:
                cast = f"{DTYPE_NAME[copy.read.dtype]} -> {DTYPE_NAME.get(copy.target.dtype, str(copy.target.dtype))}"
                lost.append(f"{copy.fqn}: {cast} changes {changed} of {copy.read.numel()} values")
        if lost:
            raise LoadContractError(
                f"{self._checkpoint} does not fit the state, and lossy_cast is 'error':{_listed(lost)}"
            )


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


def _is_direct(local: torch.Tensor, stored: torch.dtype) -> bool:
    """Whether stored bytes can be read straight into the memory of `local`."""
    is_as_shown = not (local.is_conj() or local.is_neg())
    return local.is_contiguous() and is_as_shown and local.device.type == "cpu" and local.dtype == stored


def _copy_into(local: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(local.is_inference()), torch.no_grad():
        local.copy_(copy)


__all__ = ["LoadPolicy", "LoadReport", "ReadPlan", "load", "open_checkpoint", "read_tensor"]
