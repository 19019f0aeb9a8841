"""Verify that an export equals its checkpoint: bytes always, logits on real tokens if transformers is installed.

Neither side of the logits shares code with the export: transformers loads the exported folder as a user would; the other model is
built from the plan's config and filled tensor by tensor by `Checkpoint.read`, with permutation and cast in torch. The trainer's
tests compare its own decoder with both (`trainer` and `converters` do not import each other).
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.converters.hf.export_plan import ExportPlan
from titan_ckpt.converters.hf.export_run import ExportReport
from titan_ckpt.converters.hf.folder import open_hf
from titan_ckpt.converters.hf.stream import tensor_digests
from titan_ckpt.errors import DamagedError
from titan_ckpt.location import local_path, normalise, scheme

if TYPE_CHECKING:
    from titan_ckpt.converters.hf.logits import LogitComparison

NUM_TOKENS = 512
LARGEST_DIFFERENCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of a verification. `logits` is None if transformers could not run; `why_no_logits` is the reason."""

    tensors: int
    bytes: int
    logits: LogitComparison | None
    why_no_logits: str

    @property
    def is_equal(self) -> bool:
        """Whether everything compared agrees."""
        return self.logits is None or self.logits.max_abs_difference <= LARGEST_DIFFERENCE

    def as_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "logits": None if self.logits is None else asdict(self.logits),
            "why_no_logits": self.why_no_logits,
            "equal": self.is_equal,
        }


def verify_export(checkpoint: Checkpoint, plan: ExportPlan, report: ExportReport) -> Verification:
    """Read the export back and compare. DamagedError names the first tensor with unplanned bytes, shape or dtype."""
    size_bytes = _check_bytes(plan, report)
    why = _why_no_logits(report.url)
    if why:
        return Verification(tensors=len(plan.tensors), bytes=size_bytes, logits=None, why_no_logits=why)
    from titan_ckpt.converters.hf.logits import compare_logits  # transformers is an extra

    folder = local_path(normalise(report.url))
    logits = compare_logits(checkpoint, plan, folder, real_text(NUM_TOKENS * 8), NUM_TOKENS)
    return Verification(tensors=len(plan.tensors), bytes=size_bytes, logits=logits, why_no_logits="")


def _check_bytes(plan: ExportPlan, report: ExportReport) -> int:
    model = open_hf(report.url)
    for tensor in plan.tensors:
        name = tensor.named.hf
        stored = model.tensors.get(name)
        found = None if stored is None else (stored.dtype, stored.shape)
        if found != (tensor.dtype, tensor.shape):
            raise DamagedError(f"{report.url}: {name}: expected {tensor.dtype} {tensor.shape}, found {found}")
    if set(model.tensors) != set(report.digests):
        raise DamagedError(f"{report.url}: holds other tensors than were written")
    _check_digests(tensor_digests(model.source, model.store, model.tensors), report.digests, report.url)
    return plan.size_bytes


def _check_digests(found: Mapping[str, bytes], expected: Mapping[str, bytes], url: str) -> None:
    wrong: Sequence[str] = [name for name in expected if found[name] != expected[name]]
    if wrong:
        raise DamagedError(f"{url}: {wrong[0]} and {len(wrong) - 1} more read back other bytes than were written")


def _why_no_logits(url: str) -> str:
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (pip install 'titan-ckpt[hf]')"
    return "" if scheme(url) == "file" else "transformers loads local folders only"


def real_text(num_bytes: int) -> bytes:
    """Real text that is on every machine: the standard library's sources."""
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return text[:num_bytes]
