"""Read a Hugging Face model in place as a checkpoint: load it, compare it, train from it, without a conversion.

`titan_ckpt.open_checkpoint` opens a folder or prefix with a config.json through this module, so every reader of checkpoints reads
these models too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.checkpoint.foreign_files import Recorded
from titan_ckpt.checkpoint.kinds import CheckpointKind
from titan_ckpt.converters.hf.assets import README
from titan_ckpt.converters.hf.digests import of_hub_blobs, of_small_files, of_weight_files, read_digests
from titan_ckpt.converters.hf.folder import INDEX, HfModel, differing_copies, open_hf
from titan_ckpt.converters.hf.safetensors_header import StoredTensor
from titan_ckpt.converters.models.contract import (
    check_dtypes,
    check_floats,
    check_tensors,
    main_dtype,
    warn_of_other_dtypes,
)
from titan_ckpt.converters.models.families import EMBEDDING, HEAD, copies
from titan_ckpt.converters.models.spec import spec_to_config
from titan_ckpt.converters.models.tensor_names import LAYOUTS, TITAN, Named, name_in
from titan_ckpt.converters.quantised.store import DequantisedStore
from titan_ckpt.errors import LoadContractError, NotFoundError
from titan_ckpt.format.dcp_read import FOREIGN_ATTEMPT
from titan_ckpt.format.digest import digest
from titan_ckpt.format.manifest import RAW, ChunkTable, FileEntry, Manifest, TensorEntry
from titan_ckpt.location import StrPath
from titan_ckpt.sharding.placement import Box
from titan_ckpt.sharding.repeating_columns import Int64s
from titan_ckpt.store.base import Store

USER_KEY, STORED_COPIES = "hugging_face", "stored_copies"


@dataclass(frozen=True, kw_only=True)
class HfCheckpoint(Checkpoint):
    """A checkpoint in a Hugging Face model's files."""

    model: HfModel

    @cached_property
    def digests(self) -> bytes | None:
        """None: safetensors files have no digests."""
        return None

    @property
    def files_read(self) -> tuple[str, ...]:
        """The weight files, their index and the small files, without README.md, which is for people."""
        index = [INDEX] if self.model.store.exists(INDEX) else []
        return (*self.model.files, *index, *(name for name in self.model.assets if name != README))

    def recorded(self) -> list[Recorded]:
        """Digests from `titan_ckpt_digests.json`, else the names of a hub cache's blobs; of packed weights there are none."""
        if isinstance(self.model.store, DequantisedStore):
            return []
        digests = read_digests(self.model.store)
        if digests is None:
            return list(of_hub_blobs(self.model.store, self.files_read))
        places: dict[str, dict[str, tuple[int, int]]] = {}
        for name, tensor in self.model.tensors.items():
            file = self.model.files[self.model.file_of[name]]
            places.setdefault(file, {})[name] = (tensor.offset, tensor.offset + tensor.length)
        return [*of_weight_files(digests, places), *of_small_files(digests)]

    def asset(self, name: str) -> bytes:
        """Read a file stored beside the weights."""
        if name not in self.model.assets:
            raise NotFoundError(f"{self}: no asset {name!r}; it has {sorted(self.model.assets) or 'none'}")
        return self.model.assets[name]


def open_hf_checkpoint(url: StrPath, *, store: Store | None = None) -> HfCheckpoint:
    """Open the model at `url` under our names, as step 0. Makes all checks of an import; reads no weight but a tied head's."""
    model = open_hf(url, store=store)
    spec = model.spec
    stored = model.weights
    check_tensors({name: tensor.shape for name, tensor in stored.items()}, spec, where=str(model.store))
    dtypes = {name: tensor.dtype for name, tensor in stored.items()}
    check_floats(dtypes, where=str(model.store))
    warn_of_other_dtypes(dtypes.values(), model.declared_dtype, where=str(model.store))
    check_tied_head(model)
    left = copies(spec)
    chunks = sorted(
        ((name_in(LAYOUTS[TITAN], name, spec), tensor) for name, tensor in stored.items() if name not in left),
        key=lambda item: (item[0].ours, item[0].stacked.box.offsets if item[0].stacked else ()),
    )
    check_dtypes(((named.ours, tensor.dtype) for named, tensor in chunks), where=str(model.store))
    manifest = Manifest(
        step=0,
        attempt=FOREIGN_ATTEMPT,
        kind=CheckpointKind.MODEL,
        created="",
        versions={},
        mesh=None,
        pipeline=None,
        tensors=_entries(chunks),
        chunks=_chunks(chunks, model),
        codecs=(RAW,),
        objects=(),
        files=tuple(
            FileEntry(path=path, size_bytes=model.store.stat(path).size_bytes, digest=None) for path in model.files
        ),
        config={"model": spec_to_config(spec)},
        assets={name: digest(data).hex() for name, data in model.assets.items()},
        user={USER_KEY: import_record(model)},
    )
    return HfCheckpoint(store=model.store, url=model.store.url, step=0, folder="", manifest=manifest, model=model)


def import_record(model: HfModel) -> dict[str, Any]:
    """What the manifest keeps of the files, so that an export writes the same ones."""
    spec, tensors = model.spec, model.tensors
    record: dict[str, Any] = {
        "stored_tied_head": spec.tied_embeddings and HEAD in tensors,
        "dtype": main_dtype((tensor.dtype, tensor.length) for tensor in tensors.values()),
        "metadata": dict(model.metadata),
    }
    if spec.ahead is not None:
        record[STORED_COPIES] = [name for name in copies(spec) if name != HEAD and name in tensors]
    return record


def check_tied_head(model: HfModel) -> None:
    """LoadContractError if a stored tied head differs from the embedding; one of them would be lost silently."""
    if differing_copies(model, is_of_model=True):
        raise LoadContractError(
            f"{model.store}: config.json ties the head to the embedding, but {HEAD} and {EMBEDDING} differ; "
            "set tie_word_embeddings to false to keep both"
        )


def _entries(chunks: list[tuple[Named, StoredTensor]]) -> tuple[TensorEntry, ...]:
    """Tensor entries of the sorted chunks."""
    counts = Counter(named.ours for named, _ in chunks)
    entries: dict[str, TensorEntry] = {}
    for n, (named, tensor) in enumerate(chunks):
        if named.ours not in entries:
            entries[named.ours] = TensorEntry(
                fqn=named.ours,
                dtype=tensor.dtype,
                global_shape=named.stacked.whole if named.stacked else tensor.shape,
                placements={},
                stages=None,
                first_chunk=n,
                num_chunks=counts[named.ours],
            )
    return tuple(entries.values())


def _chunks(chunks: list[tuple[Named, StoredTensor]], model: HfModel) -> ChunkTable:
    """One chunk per stored tensor; its blob is the payload itself."""
    tensors = [tensor for _, tensor in chunks]
    boxes = [named.stacked.box if named.stacked else Box.whole(tensor.shape) for named, tensor in chunks]
    nothing = np.zeros(len(tensors), dtype=np.int64)
    length = _column([tensor.length for tensor in tensors])
    return ChunkTable(
        file=_column([model.file_of[tensor.name] for tensor in tensors]),
        offset=_column([tensor.offset for tensor in tensors]),
        length=length,
        payload_offset=nothing,
        payload_length=length,
        codec=nothing,
        box_offsets=_column([offset for box in boxes for offset in box.offsets]),
        box_sizes=_column([size for box in boxes for size in box.sizes]),
        digests=None,
    )


def _column(values: list[int]) -> Int64s:
    return np.array(values, dtype=np.int64)
