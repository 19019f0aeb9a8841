"""Select tensors of a checkpoint, with new names and dtypes. No torch, no I/O; `cast.py` makes the transforms."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from titan_ckpt.errors import PlanError
from titan_ckpt.format.manifest import Manifest, TensorEntry
from titan_ckpt.rewrite.plan import Transform

log = logging.getLogger(__name__)
FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A selected tensor; `entry` has the new name and dtype."""

    source_fqn: str
    entry: TensorEntry

    @property
    def fqn(self) -> str:
        """Its name in the target."""
        return self.entry.fqn


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """A user's request: FQN globs, renames `OLD=NEW` (each `*` of NEW is replaced by what that of OLD matched), and `only`,
    a top-level part of the state."""

    only: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[str, ...] = ()

    def keeps(self, fqn: str) -> bool:
        """Whether `fqn` is selected."""
        if self.only is not None and not fqn.startswith(f"{self.only}."):
            return False
        if self.include and not any(fnmatchcase(fqn, glob) for glob in self.include):
            return False
        return not any(fnmatchcase(fqn, glob) for glob in self.exclude)

    def new_name(self, fqn: str) -> str:
        """`fqn` after the first rename that matches it.

        >>> Filter(rename=("model.layers.*.wq.*=m.*.q.*",)).new_name("model.layers.3.wq.weight")
        'm.3.q.weight'
        """
        for text in self.rename:
            old, _, new = text.partition("=")
            if match := _renamed(old, fqn):
                parts = new.split("*")
                return parts[0] + "".join(a + b for a, b in zip(match.groups(), parts[1:], strict=True))
        return fqn


def _renamed(old: str, fqn: str) -> re.Match[str] | None:
    """What each `*` of a rename's left side matches in `fqn`; None if it does not match."""
    return re.fullmatch("(.*)".join(map(re.escape, old.split("*"))), fqn)


@dataclass(frozen=True, slots=True)
class Overflows:
    """Names of tensors with values out of range of the dtype that they were cast to."""

    names: set[str] = field(default_factory=set)

    def add(self, name: str, dtype: str, largest: float) -> None:
        """Record an overflow; warn once per tensor."""
        if name not in self.names:
            self.names.add(name)
            log.warning(
                "%s: values past %.6g, the largest %s, were lost in the cast; keep the dtype, or cast to one with a wider range",
                name, largest, dtype,
            )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selected tensors in order of their new names, and the transforms of those that change.

    `overflows` is filled during the casts.
    """

    items: tuple[Selected, ...]
    filter: Filter
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    overflows: Overflows = field(default_factory=Overflows)

    @property
    def is_model_only(self) -> bool:
        """Whether only a part of the state was requested, so that the result cannot be resumed from."""
        return self.filter.only is not None or bool(self.filter.include)

    def keeps_object(self, fqn: str) -> bool:
        """Whether a value that is not a tensor is selected."""
        return self.filter.keeps(fqn)


def select(manifest: Manifest, wanted: Filter | None = None) -> Selection:
    """Select the tensors that pass `wanted`. PlanError if none is left, or two would get the same name."""
    wanted = wanted or Filter()
    for text in wanted.rename:
        old, separator, new = text.partition("=")
        if not separator or not old or old.count("*") != new.count("*"):
            raise PlanError(f"rename {text!r}: write OLD=NEW with as many * on both sides")
    _check_used(manifest, wanted)
    items = tuple(
        Selected(source_fqn=entry.fqn, entry=replace(entry, fqn=wanted.new_name(entry.fqn)))
        for entry in manifest.tensors
        if wanted.keeps(entry.fqn)
    )
    if not items:
        raise PlanError("nothing is left of the checkpoint: no tensor passes --only, --include and --exclude")
    seen: dict[str, str] = {}
    for item in items:
        other = seen.setdefault(item.fqn, item.source_fqn)
        if other != item.source_fqn:
            raise PlanError(f"{other} and {item.source_fqn} would both be named {item.fqn}: change --rename")
    return Selection(items=tuple(sorted(items, key=lambda item: item.fqn)), filter=wanted)


def _check_used(manifest: Manifest, wanted: Filter) -> None:
    """PlanError for a glob that no name matches: it has no effect, and may be a slip."""
    names = [*manifest.by_fqn, *manifest.objects_by_fqn]
    uses = [("--include", glob, fnmatchcase) for glob in wanted.include]
    uses += [("--exclude", glob, fnmatchcase) for glob in wanted.exclude]
    renames = [
        ("--rename", text.partition("=")[0], lambda name, old: bool(_renamed(old, name))) for text in wanted.rename
    ]
    for option, glob, is_match in [*uses, *renames]:
        if not any(is_match(name, glob) for name in names):
            raise PlanError(
                f"{option} {glob!r}: no tensor or value of the checkpoint matches; `inspect` lists their names"
            )


def is_cast(entry: TensorEntry, dtype: str) -> bool:
    """Whether `--dtype` changes this tensor: floating-point weights of another dtype, never optimizer state."""
    is_weight = not entry.fqn.startswith("optimizer.")
    return is_weight and entry.dtype in FLOATING and entry.dtype != dtype and bool(entry.global_shape)
