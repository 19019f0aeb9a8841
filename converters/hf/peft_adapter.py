"""A PEFT LoRA adapter, merged into the weights while they stream: W + scale * B @ A, a strip of rows at a time.

Format: adapter_config.json and adapter_model.safetensors as PEFT writes them (names `base_model.model.NAME.lora_A.weight`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_ckpt.checkpoint.foreign_files import check_own_files
from titan_ckpt.converters.hf.config import MAX_NUMBER, parse_config
from titan_ckpt.converters.hf.folder import ADAPTER_CONFIG, read_small
from titan_ckpt.converters.hf.safetensors_header import Header, StoredTensor, read_header
from titan_ckpt.converters.models.transforms import FLOATS
from titan_ckpt.errors import LoadContractError, PlanError
from titan_ckpt.location import StrPath
from titan_ckpt.parsing.json_values import show
from titan_ckpt.rewrite.cast import to_dtype
from titan_ckpt.rewrite.selection import Overflows
from titan_ckpt.sharding.placement import Box, Shape
from titan_ckpt.store.base import Buffer, Store
from titan_ckpt.store.open import open_store

ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_DIGEST = (
    "titan_ckpt.base_digest"  # in its metadata, if our trainer made it: `values_digest` of the weights it modifies
)
BASE_DTYPE = "titan_ckpt.base_dtype"  # there too: how the weights were kept in training, if quantised
log = logging.getLogger(__name__)
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# Settings that change the merge, with their supported values; null is always supported.
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "use_dora": (False,), "fan_in_fan_out": (False,), "bias": ("none",), "modules_to_save": ([],),
    "rank_pattern": ({},), "alpha_pattern": ({},), "lora_bias": (False,), "layer_replication": ([],),
    # Others (pissa, olora, corda, loftq, lora_ga) change the base weights that the factors are added to.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
# Settings that leave the merge as it is: the factors themselves say which layers they belong to. All others must be unset.
_HARMLESS = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    ]
)
_UNSET: tuple[Any, ...] = (None, False, {}, [], "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter. `factors`: weight name -> (A, B) in fp32; the update is `scale * B @ A`.

    `base_digest`: `values_digest` of the model that it was trained on; empty if that is not recorded.
    """

    where: str
    scale: float
    factors: Mapping[str, tuple[Tensor, Tensor]]
    base_digest: str = ""

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """LoadContractError for a factor whose weight is missing from the model or has another shape."""
        for name, (a, b) in self.factors.items():
            if name not in shapes:
                raise LoadContractError(f"{self.where}: adapts {name}, which this model does not have")
            if (b.shape[0], a.shape[1]) != shapes[name]:
                found = (b.shape[0], a.shape[1])
                raise LoadContractError(f"{self.where}: {name}: the update is {found}, the weight {shapes[name]}")

    def merge(self, name: str, dtype: str, target: str, overflows: Overflows) -> Callable[[memoryview, Box], Buffer]:
        """A function that adds the update to a strip of weight `name`, in fp32, rounded once to `target`."""

        def apply(raw: memoryview, box: Box) -> Buffer:
            if len(raw) == 0:
                return raw
            weight = torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(box.sizes)
            merged = to_dtype(self.merged(name, weight, box), target, name=name, overflows=overflows)
            return merged.reshape(-1).view(torch.uint8).numpy().data

        return apply

    def merged(self, name: str, weight: Tensor, box: Box) -> Tensor:
        """`weight`, a `box` of weight `name`, plus its update, in fp32."""
        a, b = self.factors[name]
        (row, column), (rows, columns) = box.offsets, box.sizes
        return weight.float() + self.scale * (b[row : row + rows] @ a[:, column : column + columns])


def open_adapter(url: StrPath) -> Adapter:
    """Open the adapter in a folder or prefix. PlanError for anything but plain LoRA."""
    store = open_store(url)
    check_own_files(store, [ADAPTER_CONFIG, ADAPTER_WEIGHTS])
    config = parse_config(read_small(store, ADAPTER_CONFIG), store.where(ADAPTER_CONFIG))
    for key, value in config.items():
        allowed = (*_ONLY[key], None) if key in _ONLY else _UNSET
        if key not in _HARMLESS and value not in allowed:
            raise PlanError(
                f"{store.where(ADAPTER_CONFIG)}: {show(key)} = {show(value)} is not supported; plain LoRA is"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if (
        type(rank) is not int
        or not 1 <= rank <= MAX_NUMBER
        or not isinstance(alpha, int | float)
        or abs(alpha) > MAX_NUMBER
    ):
        raise PlanError(
            f"{store.where(ADAPTER_CONFIG)}: r = {show(rank)}, lora_alpha = {show(alpha)} are not a rank and a scale"
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    header = read_header(store, ADAPTER_WEIGHTS)
    if dtype := header.metadata.get(BASE_DTYPE):
        log.warning(
            "%s: was trained on weights in %s, and is merged into the weights that these were made of: the merged model differs "
            "from the trained one by what %s had rounded; evaluate it",
            store, show(dtype), show(dtype),
        )  # fmt: skip
    return Adapter(
        where=str(store),
        scale=scale,
        factors=_factors(store, header, rank),
        base_digest=header.metadata.get(BASE_DIGEST, ""),
    )


def _factors(store: Store, header: Header, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for stored in header.tensors:
        match = _NAME.fullmatch(stored.name)
        if match is None:
            raise PlanError(f"{store.where(ADAPTER_WEIGHTS)}: {stored.name} is not a LoRA factor of a linear layer")
        if stored.dtype not in FLOATS:
            raise PlanError(f"{store.where(ADAPTER_WEIGHTS)}: {stored.name} is {stored.dtype}, expected floating point")
        sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = _read(store, stored)
    for name, found in sides.items():
        if (
            set(found) != {"A", "B"}
            or found["A"].ndim != 2
            or found["A"].shape[0] != rank
            or found["B"].shape[1:] != (rank,)
        ):
            shapes = {side: tuple(tensor.shape) for side, tensor in found.items()}
            raise LoadContractError(
                f"{store.where(ADAPTER_WEIGHTS)}: {name}: expected factors A and B of rank {rank}, found {shapes}"
            )
    if not sides:
        raise PlanError(f"{store.where(ADAPTER_WEIGHTS)}: holds no LoRA factors")
    return {name: (found["A"], found["B"]) for name, found in sides.items()}


def _read(store: Store, stored: StoredTensor) -> Tensor:
    data = bytearray(store.read(ADAPTER_WEIGHTS, stored.offset, stored.length))
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(stored.shape).float()
