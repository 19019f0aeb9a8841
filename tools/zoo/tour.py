"""Save and load each kind, by us and by DCP, and compare."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.errors import TitanError
from titan_ckpt.loading.load import load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from titan_ckpt.state.flatten import is_stateful
from titan_ckpt.store.open import open_store
from titan_ckpt.upkeep.copy import copy_checkpoint
from tools.zoo import animals
from tools.zoo.kinds import Kind

STEP = "step-00000001"


@dataclass(frozen=True, slots=True)
class Visit:
    """What became of one kind: how it fared with us and with DCP, and what is wrong, empty if nothing is."""

    name: str
    ours: str
    theirs: str
    wrong: str


def shown(value: Any) -> str:
    """A text that tells any two values of the zoo apart, bits and types included."""
    if is_stateful(value):
        return shown(value.state_dict())
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            return repr(value)
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return (
            f"{value.dtype}{tuple(value.shape)}{plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else ''}"
        )
    if isinstance(value, np.ndarray):
        return f"array({value.dtype!r}, {value.shape}, {value.tolist()!r})"
    if isinstance(value, np.random.Generator):
        return f"{value.bit_generator.state}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {shown(inner)}" for key, inner in value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({sorted(map(shown, value))})"
    return f"{type(value).__name__} {value!r}"


def visit(kind: Kind, folder: Path) -> Visit:
    """Put one kind through everything; `folder` is empty and of its own."""
    expected = shown(kind.full())
    theirs = _theirs(kind, folder / "theirs", expected)
    try:
        save(str(folder / "ours"), kind.full(), step=1)
    except TitanError as error:
        is_named = any(key in str(error) for key in kind.full())
        is_worse = theirs == "equal"
        wrong = f"refused, but DCP can: {error}" if is_worse else "" if is_named else f"refused without a name: {error}"
        return Visit(kind.name, "refused", theirs, wrong)
    except Exception as error:  # noqa: BLE001  (reported)
        return Visit(kind.name, "error", theirs, f"save: {type(error).__name__}: {str(error)[:200]}")
    problems = []
    for what, way in _WAYS.items():
        try:
            found = way(kind, folder)
            if found != expected:
                problems.append(f"{what}: {found[:300]} instead of {expected[:300]}")
        except Exception as error:  # noqa: BLE001  (reported)
            problems.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    if theirs == "equal":
        problems += _dcp_on_ours(kind, folder, expected)
    return Visit(kind.name, "wrong" if problems else "equal", theirs, "; ".join(problems))


def _loaded(kind: Kind, url: Path) -> str:
    state = kind.blank()
    load(str(url), state)
    return shown(state)


def _read_all(_: Kind, folder: Path) -> str:
    allow = [animals.Colour, animals.Level, animals.Pair, animals.Settings, len]
    return shown(open_checkpoint(str(folder / "ours")).read_all(allow=allow))


def _resharded(kind: Kind, folder: Path) -> str:
    plan = plan_reshard(open_checkpoint(str(folder / "ours")), MeshSpec.parse("dp_replicate=2"))
    run_plan(plan, str(folder / "resharded"))
    return _loaded(kind, folder / "resharded")


def _copied(kind: Kind, folder: Path) -> str:
    copy_checkpoint(open_checkpoint(str(folder / "ours")), open_store(str(folder / "copied")))
    return _loaded(kind, folder / "copied")


_WAYS: dict[str, Callable[[Kind, Path], str]] = {
    "load": lambda kind, folder: _loaded(kind, folder / "ours"),
    "read_all": _read_all,
    "load after reshard": _resharded,
    "load after cp": _copied,
}


def _theirs(kind: Kind, folder: Path, expected: str) -> str:
    """How DCP alone fares: equal, wrong or error."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(kind.full(), checkpoint_id=folder)
            state = kind.blank()
            dcp.load(state, checkpoint_id=folder)
        return "equal" if shown(state) == expected else "wrong"
    except BaseException as error:  # DCP's own error is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return "error"


def _dcp_on_ours(kind: Kind, folder: Path, expected: str) -> list[str]:
    """What DCP makes of our folder, where it can read its own."""
    problems = []
    for name in ("ours", "resharded", "copied"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = kind.blank()
                dcp.load(state, checkpoint_id=folder / name / STEP)
                if shown(state) != expected:
                    problems.append(f"dcp.load of {name}: {shown(state)[:300]}")
                expected_file = _theirs_converted(folder)
                if expected_file and _converted(folder / name / STEP, folder) != expected_file:
                    problems.append(f"dcp_to_torch_save of {name} differs")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problems.append(f"dcp on {name}: {type(error).__name__}: {str(error)[:200]}")
    return problems


def _theirs_converted(folder: Path) -> str:
    """DCP's own folder by `dcp_to_torch_save`; empty if it cannot, as with quantised tensors (torch 2.13)."""
    try:
        return _converted(folder / "theirs", folder)
    except CheckpointException:
        return ""


def _converted(source: Path, folder: Path) -> str:
    dcp_to_torch_save(source, folder / "converted.pt")
    return shown(torch.load(folder / "converted.pt", weights_only=False))


def report(visits: Iterable[Visit]) -> str:
    """Counts, and a line for each kind that something is wrong with."""
    seen = list(visits)
    counts = Counter((visit.ours, visit.theirs) for visit in seen)
    lines = [f"{len(seen)} kinds"]
    lines += [f"  ours {ours}, DCP's {theirs}: {count}" for (ours, theirs), count in sorted(counts.items())]
    lines += [f"WRONG {visit.name}: {visit.wrong}" for visit in seen if visit.wrong]
    return "\n".join(lines)
