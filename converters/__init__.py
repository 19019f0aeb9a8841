"""Convert Hugging Face, torchtitan and plain torch files to and from checkpoints; both HF directions run on `rewrite`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "titan_ckpt.converters":
    raise ImportError("import titan_ckpt.converters: the folder converters/ installs only as a part of titan_ckpt")

from titan_ckpt.lazy import lazy_names

if TYPE_CHECKING:
    from titan_ckpt.converters.hf.checkpoint import open_hf_checkpoint
    from titan_ckpt.converters.hf.export_run import ExportReport, export_hf
    from titan_ckpt.converters.hf.folder import HfModel, open_hf
    from titan_ckpt.converters.hf.import_run import ImportReport, import_hf

__all__ = ["ExportReport", "HfModel", "ImportReport", "export_hf", "import_hf", "open_hf", "open_hf_checkpoint"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ExportReport": "hf.export_run",
        "HfModel": "hf.folder",
        "ImportReport": "hf.import_run",
        "export_hf": "hf.export_run",
        "import_hf": "hf.import_run",
        "open_hf": "hf.folder",
        "open_hf_checkpoint": "hf.checkpoint",
    },
)
