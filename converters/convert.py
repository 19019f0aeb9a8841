"""Convert a model or a state in one call; what the command `convert` does, as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titan_ckpt.arguments import check_word, nearest
from titan_ckpt.converters.hf.export_run import ExportReport, export_hf
from titan_ckpt.converters.hf.import_run import ImportReport, import_hf
from titan_ckpt.errors import UsageError
from titan_ckpt.location import StrPath
from titan_ckpt.store.clients.options import Options, using

if TYPE_CHECKING:
    from titan_ckpt.converters.torch_file import TorchReport

OPTIONS = {
    "to-hf": ("dtype", "max_shard_bytes", "config", "merge_lora", "ema", "on_progress"),
    "from-hf": ("dtype", "layout", "on_progress"),
    "to-torch": ("only",),
    "from-torch": ("under",),
}


def convert(
    direction: str,
    source: StrPath,
    destination: StrPath,
    *,
    storage_options: Options = None,
    **options: Any,
) -> ExportReport | ImportReport | TorchReport:
    """Convert `source` to `destination`. The directions, and the functions that say more of each:

    - `"to-hf"`: a checkpoint (`URL[@STEP]`) to a new Hugging Face folder; options as of `converters.export_hf`.
    - `"from-hf"`: a Hugging Face folder to a checkpoint; options as of `converters.import_hf`.
    - `"to-torch"`: a checkpoint to one torch file; `only="model"` takes the names below it, without it.
    - `"from-torch"`: a torch file to a checkpoint; `under="model"` puts all names below it.

    UsageError for an unknown direction or an option that the direction does not have.
    """
    check_word(direction, OPTIONS, "direction")
    for name in options:
        if name not in OPTIONS[direction]:
            known = OPTIONS[direction]
            raise UsageError(f"{direction} has no option {name!r}; {nearest(name, known)}it has {', '.join(known)}")
    with using(storage_options, source, destination):
        return _convert(direction, source, destination, options)


def _convert(
    direction: str, source: StrPath, destination: StrPath, options: dict[str, Any]
) -> ExportReport | ImportReport | TorchReport:
    if direction == "to-hf":
        return export_hf(source, destination, **options)
    if direction == "from-hf":
        return import_hf(source, destination, **options)
    from titan_ckpt.converters.torch_file import (  # imports torch, which the others do not need
        export_torch,
        import_torch,
    )

    return (export_torch if direction == "to-torch" else import_torch)(source, destination, **options)
