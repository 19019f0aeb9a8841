"""Open a Hugging Face model in a folder, a hub cache or a bucket prefix: its weight files, headers, config and assets.

The index decides which weight files count. Every header is checked before an offset in it is used. Links are followed inside the
folder and its hub cache only. Of the small files, `assets` lists what is carried; a repository's code is never run or carried.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from titan_ckpt.checkpoint.foreign_files import check_own_files, check_own_folder, local_names
from titan_ckpt.converters.hf.assets import CONFIG, carry, is_carried, why_left_out
from titan_ckpt.converters.hf.config import (
    QUANTISED_FILES,
    Config,
    declared_dtype,
    encode_config,
    parse_config,
    spec_from_hf,
)
from titan_ckpt.converters.hf.digests import DIGESTS, ModelDigests, read_digests
from titan_ckpt.converters.hf.safetensors_header import StoredTensor, read_header
from titan_ckpt.converters.hf.stream import tensor_digests
from titan_ckpt.converters.models.families import HEAD, copies
from titan_ckpt.converters.models.hf_mixtures import PREDICTION_KEY, is_of_prediction_layer
from titan_ckpt.converters.models.spec import ModelSpec
from titan_ckpt.converters.models.tensor_names import is_computed
from titan_ckpt.converters.quantised.formats import ROUND
from titan_ckpt.converters.quantised.plan import SETTINGS, BlockFormat, block_format, find_packed
from titan_ckpt.converters.quantised.store import DequantisedStore, Plain
from titan_ckpt.errors import DamagedError, NotFoundError, PlanError, UnsafeContentError, UsageError
from titan_ckpt.location import StrPath, check_relative, join, local_path, url_text
from titan_ckpt.parsing.json_values import JsonValue, show
from titan_ckpt.rewrite.plan import RewriteSource, SourceTensor
from titan_ckpt.store.base import Store
from titan_ckpt.store.open import open_store

log = logging.getLogger(__name__)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MAX_ASSET_BYTES = 100_000_000
_TORCH_FILES = re.compile(r"pytorch_model.*\.bin|.*\.pth?|consolidated.*\.pth")


@dataclass(frozen=True, kw_only=True)
class HfModel:
    """An opened model. `files[n]` holds the tensors whose `file_of` is n; `assets` are the small files carried with it.

    `left_out`: files and settings that are not carried, with the reason. `shares_ends`: the modules that predict further tokens
    have the model's embedding and head, or none.
    """

    store: Store
    url: str
    files: tuple[str, ...]
    tensors: Mapping[str, StoredTensor]
    file_of: Mapping[str, int]
    config: Config
    assets: Mapping[str, bytes]
    metadata: Mapping[str, str]
    left_out: Mapping[str, str]
    shares_ends: bool = True

    @property
    def spec(self) -> ModelSpec:
        """The spec in config.json, without modules that it names and the files lack, as those that transformers saves do."""
        spec = spec_from_hf(self.config, self.store.where(CONFIG))
        has_ahead = self.shares_ends and any(is_of_prediction_layer(name, self.config) for name in self.tensors)
        return spec if has_ahead else replace(spec, ahead=None)

    @property
    def declared_dtype(self) -> str | None:
        """The weights' dtype according to config.json."""
        return declared_dtype(self.config, self.store.where(CONFIG))

    @property
    def weights(self) -> dict[str, StoredTensor]:
        """The tensors that make up the model."""
        left_out = set(self.left_out_tensors)
        return {name: tensor for name, tensor in self.tensors.items() if name not in left_out}

    @property
    def left_out_tensors(self) -> list[str]:
        """Tensors that are not read: buffers that readers compute, and modules that predict further tokens but are not ours."""
        is_whole = self.spec.ahead is not None
        return sorted(
            name
            for name in self.tensors
            if is_computed(name) or (not is_whole and is_of_prediction_layer(name, self.config))
        )

    @property
    def source(self) -> RewriteSource:
        """The model as the source of a rewrite, tensors in byte order."""
        return self._source(None)

    @property
    def checked_source(self) -> RewriteSource:
        """`source` with the digests recorded beside the model, if there are any."""
        return self._source(read_digests(self.store))

    def _source(self, digests: ModelDigests | None) -> RewriteSource:
        tensors = {}
        for name, tensor in self.tensors.items():
            number = self.file_of[name]
            recorded = None if digests is None else digests.tensor(self.files[number], name)
            tensors[name] = SourceTensor.single(
                tensor.dtype, tensor.shape, object_index=number, start=tensor.offset, digest=recorded
            )
        return RewriteSource(objects=self.files, tensors=tensors)


def open_hf(url: StrPath, *, store: Store | None = None) -> HfModel:
    """Open the model at `url`: a folder or prefix with config.json, or a hub cache's `models--...` folder.

    Reads headers only, and the copies of the embedding and the head in modules that predict further tokens: with others of
    their own these modules are left out, and a warning says so.

    NotFoundError if files are missing, DamagedError if headers, index and sizes disagree, PlanError for weights that are not
    safetensors.
    """
    store = store or _snapshot(open_store(url))
    check_own_files(store, [SINGLE, INDEX])
    check_own_files(store, filter(is_carried, local_names(store)), are_published=True)
    found = {entry.path: entry.size_bytes for entry in store.list()}
    names = {path: size_bytes for path, size_bytes in found.items() if "/" not in path}
    if CONFIG not in names:
        _explain_missing(store, names)
    config = parse_config(read_small(store, CONFIG), store.where(CONFIG))
    if config.get("auto_map"):
        log.warning("%s: auto_map names code of the model's own, which is neither run nor copied", store.where(CONFIG))
    if quantised := [name for name in QUANTISED_FILES if name in names]:
        raise PlanError(
            f"{store.where(quantised[0])}: the settings of quantised weights; convert the model they were made from"
        )
    if ADAPTER_CONFIG in names:
        log.warning(
            "%s: an adapter lies beside the model and is left out; --merge-lora merges it", store.where(ADAPTER_CONFIG)
        )
    weight_map = _weight_map(store, names)
    weights = _read_files(store, names, weight_map)
    carried = carry(_read_assets(store, found), str(store))
    assets, dropped = dict(carried.files), dict(carried.left_out)
    if (packing := block_format(config)) is not None:
        config = {key: value for key, value in config.items() if key != SETTINGS}
        dtype = declared_dtype(config, store.where(CONFIG))
        store, weights = _unpacked(store, weights, packing, dtype if dtype in ROUND else "bfloat16")
        assets[CONFIG] = _without_key(assets[CONFIG], SETTINGS, store.where(CONFIG))
        dropped[f"{CONFIG}: {SETTINGS}"] = f"weights of {packing.name} are read as plain numbers"
    others = {name: why_left_out(name) for name in sorted(found) if _is_left_out(name, weights.files)}
    model = HfModel(
        store=store,
        url=url_text(url),
        files=weights.files,
        tensors=weights.tensors,
        file_of=weights.file_of,
        config=config,
        assets=assets,
        metadata=weights.metadata,
        left_out=others | dropped,
    )
    return model if _shares_ends(model) else _without_prediction(model)


def _without_key(settings: bytes, key: str, where: str) -> bytes:
    """A carried config.json without one more key."""
    return encode_config({name: value for name, value in parse_config(settings, where).items() if name != key})


def _without_prediction(model: HfModel) -> HfModel:
    """The model without modules that predict further tokens; the config.json that is carried does not name them either."""
    settings = parse_config(model.assets[CONFIG], model.store.where(CONFIG)) | {PREDICTION_KEY: 0}
    return replace(model, shares_ends=False, assets={**model.assets, CONFIG: encode_config(settings)})


def _shares_ends(model: HfModel) -> bool:
    """Whether modules that predict further tokens, if there are any, have the model's embedding and head. Warns if not.

    What was equal when it was exported and is not now is damaged, which an import and `verify` tell, and no other weight.
    """
    differing = differing_copies(model, is_of_model=False) if model.config.get(PREDICTION_KEY) else []
    own = [pair for pair in differing if not _were_equal(model, *pair)]
    for name, original in own[:1]:
        log.warning(
            "%s: %s differs from %s, which modules that predict further tokens share here: they are left out",
            model.store, name, original,
        )  # fmt: skip
    return not own


def differing_copies(model: HfModel, *, is_of_model: bool) -> list[tuple[str, str]]:
    """Tensors whose bytes differ from the one that they are a copy of, each with that one.

    `is_of_model`: the tied head, which is a part of the model itself; else those of modules that predict further tokens.
    """
    pairs = {
        name: original
        for name, original in copies(model.spec).items()
        if name in model.tensors and original in model.tensors and (name == HEAD) == is_of_model
    }
    digests = tensor_digests(model.source, model.store, {*pairs, *pairs.values()})
    return [(name, original) for name, original in pairs.items() if digests[name] != digests[original]]


def _were_equal(model: HfModel, name: str, original: str) -> bool:
    """Whether two tensors had the same bytes when the model was exported, by the digests beside it."""
    recorded = model.checked_source.tensors
    return recorded[name].digests is not None and recorded[name].digests == recorded[original].digests


def _read_assets(store: Store, found: Mapping[str, int]) -> dict[str, bytes]:
    names = sorted(filter(is_carried, found))
    check_own_files(store, names, are_published=True)
    for name in names:
        if found[name] > MAX_ASSET_BYTES:
            raise PlanError(f"{name} has {found[name]} bytes: too large for an asset (limit {MAX_ASSET_BYTES})")
    return {name: store.read(name) for name in names}


def _is_left_out(name: str, weights: Sequence[str]) -> bool:
    """Whether to say of a file that it is left out; hidden files belong to git and the hub."""
    is_hidden = any(part.startswith(".") for part in name.split("/"))
    return not is_hidden and not is_carried(name) and name not in (*weights, INDEX, DIGESTS)


def read_small(store: Store, path: str) -> bytes:
    """A JSON file of a model; PlanError if it is too large to be one."""
    size_bytes = store.stat(path).size_bytes
    if size_bytes > MAX_ASSET_BYTES:
        raise PlanError(f"{store.where(path)}: {size_bytes} bytes; no such file is larger than {MAX_ASSET_BYTES}")
    return store.read(path, 0, size_bytes)


def _snapshot(store: Store) -> Store:
    """The store of the model: in a hub cache the snapshot of `refs/main` (else the only one), otherwise `store`."""
    snapshots = store.folders("snapshots")
    if not snapshots or store.exists(CONFIG):
        return store
    check_own_files(store, ["refs/main"])
    revision = store.read("refs/main").decode("utf-8", "replace").strip() if store.exists("refs/main") else snapshots[0]
    if revision not in snapshots or (len(snapshots) > 1 and not store.exists("refs/main")):
        raise UsageError(f"{store}: a hub cache with snapshots {', '.join(snapshots)}; name one: {store}/snapshots/...")
    check_own_folder(store, f"snapshots/{revision}")
    return open_store(join(store.url, "snapshots", revision))


def _from_hub(url: str) -> str:
    """How to fetch ORG/NAME, if that is what was given in a folder's place."""
    name = os.path.relpath(local_path(url))
    is_id = name.count("/") == 1 and not name.startswith(".") and not os.path.exists(name.partition("/")[0])
    return (
        f"; a model of the Hub is fetched first: hf download {name} --local-dir {os.path.basename(name)}"
        if is_id
        else ""
    )


def _explain_missing(store: Store, names: Mapping[str, int]) -> NoReturn:
    if not names:
        what = "it is a file" if os.path.isfile(local_path(store.url)) else "the folder is empty or does not exist"
        raise NotFoundError(f"{store}: {what}; expected a Hugging Face model with {CONFIG}{_from_hub(store.url)}")
    raise NotFoundError(
        f"{store}: no {CONFIG}; a Hugging Face model has one (an unfinished copy has not). Found {sorted(names)[:6]}"
    )


def _weight_map(store: Store, names: Mapping[str, int]) -> dict[str, str] | None:
    """Tensor name -> file name from the index; None if the model is a single file."""
    if INDEX in names:
        if SINGLE in names:
            log.warning("%s: has both %s and %s; the index counts", store, INDEX, SINGLE)
        return _read_index(store)
    if SINGLE in names:
        return None
    weights = sorted(name for name in names if name.endswith(SUFFIX))
    if weights:
        raise NotFoundError(f"{store}: {weights[0]} and others, but neither {SINGLE} nor {INDEX}: the index is missing")
    torch_files = sorted(name for name in names if _TORCH_FILES.fullmatch(name))
    if torch_files:
        raise PlanError(
            f"{store}: only {torch_files[0]}, no safetensors. Load it with transformers and `save_pretrained`, or read a "
            "state dict with `convert from-torch`"
        )
    raise NotFoundError(f"{store}: no weights: neither {SINGLE} nor {INDEX}")


def _read_index(store: Store) -> dict[str, str]:
    where = store.where(INDEX)
    document = JsonValue(parse_config(read_small(store, INDEX), where), where)
    weight_map = {name: file.text() for name, file in document["weight_map"].items()}
    if not weight_map:
        raise DamagedError(f"{where}: no weight_map")
    for name, file in weight_map.items():
        try:
            check_relative(file)
        except UsageError as error:
            raise UnsafeContentError(f"{where}: {name}: {show(file)} is outside the model's folder") from error
        if not file.isprintable():
            raise UnsafeContentError(f"{where}: {name}: {show(file)} is not a name for a file")
    return weight_map


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The checked headers of all weight files."""

    files: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    file_of: dict[str, int]
    metadata: dict[str, str]


def _read_files(store: Store, names: Mapping[str, int], weight_map: Mapping[str, str] | None) -> _Weights:
    files = (SINGLE,) if weight_map is None else tuple(sorted(set(weight_map.values())))
    tensors: dict[str, StoredTensor] = {}
    file_of: dict[str, int] = {}
    metadata: dict[str, str] = {}
    check_own_files(store, files)
    for file in files:
        if file not in names and not store.exists(file):
            raise DamagedError(f"{store.where(file)}: missing, though {INDEX} names it")
    for number, file in enumerate(files):
        header = read_header(store, file)
        metadata |= header.metadata
        for tensor in header.tensors:
            _check_listed(store, tensor.name, file, weight_map)
            if tensor.name in tensors:
                raise DamagedError(f"{tensor.name}: in both {files[file_of[tensor.name]]} and {file} of {store}")
            tensors[tensor.name], file_of[tensor.name] = tensor, number
    lost = [name for name in weight_map or () if name not in tensors]
    if lost:
        assert weight_map is not None
        raise DamagedError(f"{store.where(weight_map[lost[0]])}: {lost[0]} is missing, though {INDEX} lists it")
    return _Weights(files=files, tensors=tensors, file_of=file_of, metadata=metadata)


def _unpacked(store: Store, weights: _Weights, packing: BlockFormat, dtype: str) -> tuple[Store, _Weights]:
    """The store and the tensors with plain ones in place of packed ones, behind the other bytes of their files."""
    paths = {name: weights.files[number] for name, number in weights.file_of.items()}
    found = find_packed(packing, weights.tensors, paths, where=str(store))
    ends = {path: store.stat(path).size_bytes for path in weights.files}
    plain: dict[str, list[Plain]] = {}
    made: dict[str, StoredTensor] = {}
    for name, packed in found.packed.items():
        path = packed.values.path
        tensor = Plain(packed=packed, dtype=dtype, offset=ends[path])
        ends[path] += tensor.length
        plain.setdefault(path, []).append(tensor)
        made[name] = StoredTensor(
            name=name, dtype=dtype, shape=packed.shape, offset=tensor.offset, length=tensor.length
        )
    numbers = {path: number for number, path in enumerate(weights.files)}
    kept = {name: tensor for name, tensor in weights.tensors.items() if name not in found.parts}
    file_of = {name: weights.file_of[name] for name in kept}
    file_of |= {name: numbers[packed.values.path] for name, packed in found.packed.items()}
    ordered = sorted({**kept, **made}.values(), key=lambda tensor: (file_of[tensor.name], tensor.offset))
    tensors = {tensor.name: tensor for tensor in ordered}
    return DequantisedStore(store, plain), replace(weights, tensors=tensors, file_of=file_of)


def _check_listed(store: Store, name: str, file: str, weight_map: Mapping[str, str] | None) -> None:
    if weight_map is not None and weight_map.get(name) != file:
        listed = weight_map.get(name, "no file")
        raise DamagedError(f"{store.where(file)}: holds {name}, which {INDEX} lists in {listed}")


def encode_index(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """`model.safetensors.index.json` as transformers writes it."""
    content = {
        "metadata": {"total_parameters": total_parameters, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(content, indent=2) + "\n").encode()
