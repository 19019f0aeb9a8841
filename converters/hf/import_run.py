"""`import_hf`: plan, stream, commit."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.commit_proved import commit_checkpoint
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.console.units import format_size
from titan_ckpt.converters.hf.checkpoint import check_tied_head
from titan_ckpt.converters.hf.digests import DIGESTS, REMEDY, check_headers
from titan_ckpt.converters.hf.folder import HfModel, open_hf
from titan_ckpt.converters.hf.import_plan import ImportPlan, import_manifest, plan_import, state_paths
from titan_ckpt.converters.hf.stream import OnBytes, stream, tensor_digests
from titan_ckpt.converters.models.families import copies
from titan_ckpt.converters.models.tensor_names import TITAN
from titan_ckpt.errors import AlreadyExistsError, DamagedError, StoreError, TitanError
from titan_ckpt.format.commit import find_commit, found_before
from titan_ckpt.format.dcp_metadata import dcp_metadata
from titan_ckpt.format.names import ASSETS, new_attempt, step_folder
from titan_ckpt.location import StrPath, check_writable, parse_location
from titan_ckpt.rewrite.execute import FileResult
from titan_ckpt.store.base import Store
from titan_ckpt.store.clients.options import Options, using
from titan_ckpt.store.open import open_store
from titan_ckpt.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """Result of an import. `size_bytes`: all tensors as stored; `overflowed`: tensors with values that `dtype` cannot hold."""

    checkpoint: Checkpoint
    num_tensors: int
    size_bytes: int
    overflowed: tuple[str, ...]


def import_hf(
    src: StrPath | HfModel,
    dst: StrPath,
    *,
    dtype: str | None = None,
    layout: str = TITAN,
    on_progress: OnBytes | None = None,
    storage_options: Options = None,
) -> ImportReport:
    """Write the Hugging Face model at `src` as a committed model-only checkpoint `dst` (`URL[@STEP]`, step 0 if none is given).

    Dtypes are kept unless `dtype` is given. Config and tokenizer files are stored in the checkpoint and restored by `export_hf`.
    `layout` names the tensors for another trainer (`torchtitan`, `torchtitan-qkv`).
    """
    with using(storage_options, src, dst):
        model = src if isinstance(src, HfModel) else open_hf(src)
        location = parse_location(dst)
        plan = plan_import(model, dtype=dtype, step=location.step or 0, attempt=new_attempt(), layout=layout)
        run_import(plan, location.url, on_progress=on_progress)
        checkpoint = open_checkpoint(location.url, step=plan.step)
    return ImportReport(
        checkpoint=checkpoint,
        num_tensors=len(checkpoint.manifest.tensors),
        size_bytes=plan.size_bytes,
        overflowed=tuple(sorted(plan.overflows.names)),
    )


def run_import(plan: ImportPlan, url: str, *, on_progress: OnBytes | None = None) -> None:
    """Write and commit `plan` into the run at `url`; a failure leaves nothing behind."""
    check_import(plan, url)
    check_writable(url)
    store = open_store(url)
    folder = step_folder(plan.step)
    try:
        results = _stream(plan, store, on_progress)
        for name, data in plan.model.assets.items():
            store.write(f"{folder}/{plan.attempt}/{ASSETS}/{name}", [data])
        manifest = import_manifest(
            plan,
            results,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            versions={"titan_ckpt": __version__, "python": platform.python_version()},
        )
        commit_checkpoint(store, manifest, dcp_metadata(manifest, paths=state_paths(plan)), replaces=None)
    except BaseException:
        if not _may_be_committed(plan, store):
            store.delete([entry.path for entry in store.list(f"{folder}/{plan.attempt}")])
        raise


def _may_be_committed(plan: ImportPlan, store: Store) -> bool:
    """Whether this attempt's COMMIT is there, or that is unknown: a write may have failed after all was written."""
    try:
        commit = find_commit(store, plan.step)
    except TitanError:
        return True
    return commit is not None and commit.attempt == plan.attempt


def _stream(plan: ImportPlan, store: Store, on_progress: OnBytes | None) -> list[FileResult]:
    """Write the data files; DamagedError if a tensor is not the one that was exported."""
    model = plan.model
    with _explained(model):
        return stream(
            model.checked_source, model.store, store, plan.files, is_file_digested=True, on_progress=on_progress
        )


@contextmanager
def _explained(model: HfModel) -> Iterator[None]:
    """A tensor that is not the one that was exported: say where that is recorded."""
    try:
        yield
    except DamagedError as error:
        if not model.store.exists(DIGESTS):
            raise
        raise DamagedError(f"{error} {REMEDY}") from error


def check_import(plan: ImportPlan, url: str) -> None:
    """Check the destination and the weights: the step is free, the disk has space, a tied head equals the embedding."""
    check_writable(url)
    store = open_store(url)
    found_before(store, plan.step)
    if find_commit(store, plan.step) is not None:
        raise AlreadyExistsError(f"{store}@{plan.step} is committed already; give another run, or a step as URL@STEP")
    _check_space(store, plan)
    check_headers(plan.model.store)
    check_tied_head(plan.model)
    _check_copies(plan.model)


def _check_copies(model: HfModel) -> None:
    """Compare copies of the embedding and the head, which are not written, with the record; DamagedError as of other tensors."""
    if model.store.exists(DIGESTS):
        with _explained(model):
            tensor_digests(model.checked_source, model.store, copies(model.spec).keys() & model.tensors.keys())


def _check_space(store: Store, plan: ImportPlan) -> None:
    free = store.free_bytes()
    if free is not None and free < plan.size_bytes:
        raise StoreError(f"{store}: needs {format_size(plan.size_bytes)}, the disk has {format_size(free)} free")
