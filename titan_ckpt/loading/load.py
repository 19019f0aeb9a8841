"""Loading: ranged reads straight into the destination tensors, from any mesh to any mesh, with strict checks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from titan_ckpt.arguments import check_type
from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.open import as_checkpoint, open_checkpoint
from titan_ckpt.errors import LoadContractError, NotFoundError
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.structure import owner_of
from titan_ckpt.loading.casts import PAIRS, holds_every_value
from titan_ckpt.loading.destinations import destination_problems
from titan_ckpt.loading.grow import grown
from titan_ckpt.loading.objects import read_objects, settle
from titan_ckpt.loading.policy import LoadPolicy, LoadReport, OnMismatch, VerifyReads, is_judged_by_values, listed
from titan_ckpt.loading.read_plan import ReadPlan
from titan_ckpt.loading.shared.run import load_shared
from titan_ckpt.loading.subclasses import mark_problems, spread, stored_marks
from titan_ckpt.loading.together import failures_told, is_alone, run_together
from titan_ckpt.location import StrPath
from titan_ckpt.sharding.placement import Box
from titan_ckpt.state.flatten import FlatState, Names, flatten
from titan_ckpt.state.modes import without_modes
from titan_ckpt.state.state_dict import (
    DTYPE_NAME,
    TORCH_DTYPE,
    as_bytes,
    detached_shard,
    has_part_of,
    local_shard,
)
from titan_ckpt.store.base import Store
from titan_ckpt.store.deadline import TimedCall

log = logging.getLogger(__name__)


@without_modes()
def load(
    checkpoint: Checkpoint | StrPath | Store,
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
        check_type(prefix, "prefix", str, hint="the name above the state's own, such as 'ema'")
        state = {prefix: state} if prefix else state
        give_up_at = time.monotonic() + policy.timeout_s
        prepare = partial(_prepared, checkpoint, storage_options, state, policy, give_up_at)
        is_shared = policy.broadcast and not is_alone()
        if not is_shared:
            tensors = flatten(state).tensors.values() if policy.together else ()
            found = run_together(prepare, lambda prepared: prepared.plan.run(give_up_at), tensors, call=call)
    if is_shared:  # all ranks take part, and hear of a failure there
        found = load_shared(prepare, lambda prepared: prepared.plan, give_up_at=give_up_at)
    report, flat = found.report, found.flat
    for fqn, value in report.objects.items():
        report.objects[fqn] = settle(flat.objects[fqn], value)
        flat.put(fqn, report.objects[fqn])
    flat.give_back()
    return report


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A load that is checked whole and planned; its plain values are in the report."""

    report: LoadReport
    flat: FlatState
    plan: ReadPlan


def _prepared(
    checkpoint: Checkpoint | StrPath | Store,
    storage_options: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    policy: LoadPolicy,
    give_up_at: float,
) -> _Prepared:
    """Check and plan what this rank reads, and read the plain values; `state` stays as it is."""
    with TimedCall(give_up_at):
        opened = as_checkpoint(checkpoint, storage_options)
        names = _names(opened)
        flat = grown(opened, flatten(state, stored=names), names)
        report, plan = _planned(opened, flat, policy)
        wanted = [name for name in report.loaded if name in flat.objects]
        report.objects.update(read_objects(opened, wanted, flat.objects, policy))
    return _Prepared(report, flat, plan)


def _names(checkpoint: Checkpoint) -> Names:
    manifest = checkpoint.manifest
    return Names(values=manifest.objects_by_fqn, all=[*manifest.by_fqn, *manifest.objects_by_fqn])


def _planned(checkpoint: Checkpoint, flat: FlatState, policy: LoadPolicy) -> tuple[LoadReport, ReadPlan]:
    """Check everything that can be checked without the tensors' bytes, and plan this rank's reads."""
    report = LoadReport()
    plan = ReadPlan(checkpoint, policy, report)
    add_state(plan, flat, policy, report)
    return report, plan


def add_state(plan: ReadPlan, flat: FlatState, policy: LoadPolicy, report: LoadReport) -> None:
    """Check `flat` against the checkpoint of `plan`, into `report`, then add the reads that fill its tensors.

    LoadContractError for differences that the policy forbids.
    """
    checkpoint = plan.checkpoint
    marks = stored_marks(checkpoint, flat, policy)
    copies, problems = spread(checkpoint, flat, marks)
    _apply_contract(checkpoint, flat, policy, report, [*mark_problems(checkpoint, flat, marks), *problems], copies)
    for fqn in report.loaded:
        tensor = flat.tensors.get(fqn)
        if tensor is not None and fqn in copies:
            plan.add_copy(fqn, copies[fqn], detached_shard(tensor))
        elif tensor is not None and has_part_of(tensor):
            plan.add(checkpoint.manifest.by_fqn[fqn], tensor)


def read_tensor(checkpoint: Checkpoint, fqn: str, box: Box | None = None) -> torch.Tensor:
    """Read a tensor, or `box` of it, into CPU memory; verifies every chunk it touches. NotFoundError for an unknown name."""
    entry = checkpoint.manifest.by_fqn.get(fqn)
    if entry is None:
        raise NotFoundError(f"{checkpoint}: no tensor {fqn!r}; `titan-ckpt inspect` lists them")
    box = box or Box.whole(entry.global_shape)
    tensor = torch.empty(box.sizes, dtype=TORCH_DTYPE[entry.dtype], device="cpu")
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
        if entry is None and fqn in stored.objects_by_fqn:
            errors.append(f"{fqn}: is a tensor in the state and a value in the checkpoint; put a value in its place")
        elif entry is None:
            report.missing.append(fqn)
        elif entry.global_shape != tuple(tensor.shape) and fqn not in copies:
            errors.append(f"{fqn}: checkpoint has global shape {entry.global_shape}, model wants {tuple(tensor.shape)}")
        else:
            report.loaded.append(fqn)
            _judge_dtype(fqn, entry.dtype, tensor.dtype, policy, report, errors)
    _sort_values(stored, flat, report, errors)
    is_below = _below_own_names(flat.root, [*tensors, *objects])
    wanted = {*tensors, *flat.objects}
    made = {owner_of(name) for name in flat.marks}
    names = [fqn for fqn in [*stored.by_fqn, *stored.objects_by_fqn] if fqn not in wanted]
    report.extra.extend(fqn for fqn in names if is_below(fqn) and fqn.rpartition(".")[0] not in made)
    fillable = {fqn: tensors[fqn] for fqn in report.loaded if fqn in tensors and has_part_of(tensors[fqn])}
    errors += destination_problems(fillable, partial(_have_equal_values, checkpoint, fillable))
    _judge(policy.missing, "missing from the checkpoint", report.missing, errors)
    _judge(policy.extra, "in the checkpoint but not in the state", report.extra, errors)
    if errors:
        raise LoadContractError(f"{checkpoint} does not fit the state:{listed(errors)}")


def _sort_values(stored: Manifest, flat: FlatState, report: LoadReport, errors: list[str]) -> None:
    """Sort the names of plain values into the report; an error for each that cannot take what is stored."""
    for fqn in [each for each in flat.objects if each not in flat.marks]:
        if fqn in flat.fixed and fqn in stored.objects_by_fqn:
            errors.append(f"{fqn}: is in a {flat.fixed[fqn]}, which cannot be changed")
        if fqn in stored.by_fqn:
            found = stored.by_fqn[fqn]
            errors.append(
                f"{fqn}: is {type(flat.objects[fqn]).__name__} in the state and a {found.dtype} tensor of shape "
                f"{found.global_shape} in the checkpoint; put such a tensor in its place"
            )
            continue
        (report.loaded if fqn in stored.objects_by_fqn else report.missing).append(fqn)


def _below_own_names(root: Any, names: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is below one of the state's own: the key of a container, which may have dots, or a first part."""
    own = root if isinstance(root, Mapping) else dict.fromkeys(names)
    dotted = tuple(f"{key}." for key, value in own.items() if "." in str(key) and _has_names(value))
    tops = {str(key).partition(".")[0] for key in own if f"{key}." not in dotted}
    return lambda fqn: fqn.partition(".")[0] in tops or fqn.startswith(dotted)


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or hasattr(value, "state_dict")


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
    elif is_exact or is_judged_by_values(policy):
        _judge(policy.cast, f"{text} changes the dtype", [fqn], errors)
    else:
        _judge(policy.lossy_cast, f"{text} may lose precision", [fqn], errors)


def _have_equal_values(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], a: str, b: str) -> bool:
    """Whether two names whose tensors are the same memory are stored with equal values, on this rank's shard."""
    entries = [checkpoint.manifest.by_fqn[fqn] for fqn in (a, b)]
    boxes = [local_shard(fqn, tensors[fqn]).box for fqn in (a, b)]
    if entries[0].dtype != entries[1].dtype or boxes[0].sizes != boxes[1].sizes:
        return False
    found = [read_tensor(checkpoint, fqn, box) for fqn, box in zip((a, b), boxes, strict=True)]
    return bytes(as_bytes(found[0])) == bytes(as_bytes(found[1]))


__all__ = ["LoadPolicy", "LoadReport", "ReadPlan", "add_state", "load", "open_checkpoint", "read_tensor"]
