"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + alpha / rank * B A x, where W is frozen and A and B are trained.

Checkpoints of such a run hold only the adapters and their moments; W is read again from `resume.from`, and kept in NF4 if
`LoraConfig.base` says so. Under tensor parallelism the factor on the sharded side of W is sharded like W; the other is replicated
and its gradient is a partial sum.

Names: A of `q_proj.weight` is `q_proj.lora_A.weight`; PEFT's are the same behind `base_model.model.`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from titan_ckpt.checkpoint.checkpoint import Checkpoint
from titan_ckpt.errors import AlreadyExistsError, ConfigError, LoadContractError, MissingExtraError, UsageError
from titan_ckpt.location import redact
from titan_ckpt.store.open import open_store
from titan_ckpt.trainer.device_mesh import RankMesh
from titan_ckpt.trainer.model.linear import Nf4Linear, check_nf4, nf4_bytes
from titan_ckpt.trainer.model.plan import Plan

_OF_TOKENIZER = re.compile(r"tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|chat_template\.jinja")
FACTORS = ("lora_A", "lora_B")
BASE = "base"  # in the training record: url, step and digest of the values that the adapters modify
BASE_DIGEST = "titan_ckpt.base_digest"  # the same digest in the metadata of an exported adapter
BASE_DTYPE = "titan_ckpt.base_dtype"  # there too: `LoraConfig.base`, if the base was quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters; `rank` 0 trains the whole model."""

    rank: int = 0  # of the adapters; 0: none
    alpha: float = 16.0  # adapters are scaled by alpha / rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # projections with adapters
    base: Literal["float32", "nf4"] = "float32"  # how the weights of the targets are kept; nf4: 4 bits a value (QLoRA)


def check_lora(lora: LoraConfig, *, base: str) -> None:
    """Refuse adapters without rank or base model, and a kept base without adapters."""
    if not lora.rank and lora.base != "float32":
        raise ConfigError(
            f'lora.base = "{lora.base}" keeps the base of adapters, but lora.rank = 0 trains the whole model; set lora.rank'
        )
    if not lora.rank:
        return
    if lora.rank < 0 or not lora.alpha > 0.0:
        raise ConfigError(f"lora: rank {lora.rank} and alpha {lora.alpha} must be more than 0")
    if not base:
        raise ConfigError(
            "lora.rank is set, but resume.from is empty; it, or model.from, names the model that is adapted"
        )


def check_targets(lora: LoraConfig, plan: Plan) -> None:
    """ConfigError unless every target is a projection of the model's blocks, and `lora.base` can hold its weight."""
    known = sorted({fqn.rpartition(".")[2] for fqn in plan.linears})
    unknown = [name for name in lora.targets if name not in known]
    if lora.rank and (unknown or not lora.targets):
        raise ConfigError(f"lora.targets {list(unknown or lora.targets)}: choose from {', '.join(known)}")
    if lora.base == "nf4":
        tied = {*plan.spec.tied, *plan.spec.tied.values()}
        for fqn, linear in targets_of(lora, plan).items():
            check_nf4(fqn, linear)
            if f"{fqn}.weight" in tied:
                raise ConfigError(
                    f'lora.base = "nf4": {fqn}.weight is tied to another weight, which is kept in float32'
                )


def targets_of(lora: LoraConfig, plan: Plan) -> dict[str, nn.Linear]:
    """The projections of the whole model that have adapters."""
    return {fqn: linear for fqn, linear in plan.linears.items() if fqn.rpartition(".")[2] in lora.targets}


def adapter_sizes(lora: LoraConfig, linear: nn.Linear) -> tuple[int, int]:
    """The values of A and of B."""
    return lora.rank * linear.in_features, lora.rank * linear.out_features


def kept_bytes(lora: LoraConfig, plan: Plan) -> float:
    """What one copy of the model's weights takes: 4 bytes a value, fewer for those in NF4."""
    quantised = targets_of(lora, plan).values() if lora.rank and lora.base == "nf4" else ()
    return 4.0 * plan.num_parameters + sum(nf4_bytes(m.weight.numel()) - 4.0 * m.weight.numel() for m in quantised)


def add_adapters(part: nn.Module, plan: Plan, lora: LoraConfig, ranks: RankMesh) -> set[str]:
    """Add the factors to the target projections of a stage; must come before any parallelism.

    Returns the FQNs whose gradients are partial over tp.
    """
    partial = set()
    targets = targets_of(lora, plan)
    for fqn, module in list(part.named_modules()):
        if fqn in targets and isinstance(module, nn.Linear):
            projection: nn.Module = module
            if lora.base == "nf4":
                projection = Nf4Linear(module)
                part.set_submodule(fqn, projection)
            with torch.device("meta"):
                projection.add_module("lora_A", nn.Linear(module.in_features, lora.rank, bias=False))
                projection.add_module("lora_B", nn.Linear(lora.rank, module.out_features, bias=False))
            projection.register_forward_hook(_Add(lora.alpha / lora.rank))
            partial |= {f"{fqn}.{factor}.weight" for factor in _cut(projection, plan.cut(fqn), ranks)}
    return partial


class _Add:
    """A forward hook that adds the adapter's output to the projection's."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        a, b = (module.get_submodule(factor) for factor in FACTORS)
        update: Tensor = b(a(inputs[0]))
        return output + self._scale * update


def _cut(projection: nn.Module, dim: int | None, ranks: RankMesh) -> list[str]:
    """Shard one factor like its projection; returns the names of factors whose gradient is then partial over tp."""
    mesh = ranks.tp_mesh()
    if mesh is None or dim is None:
        return []
    cut, whole = ("lora_B", "lora_A") if dim == 0 else ("lora_A", "lora_B")
    factor = projection.get_submodule(cut)
    part = factor.get_parameter("weight").detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    factor.register_parameter("weight", nn.Parameter(DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)))
    return [whole]


@torch.no_grad()
def start_adapters(parameters: dict[str, nn.Parameter]) -> None:
    """Freeze everything but the adapters, and start from a zero update (B = 0; A is already random)."""
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_adapter(name))
        if name.endswith("lora_B.weight"):
            parameter.zero_()


def is_adapter(name: str) -> bool:
    """Whether a weight is an adapter's factor."""
    return name.rpartition(".")[0].endswith(FACTORS)


def adapters_of(names: Iterable[str]) -> list[str]:
    """The factors among `names`."""
    return [name for name in names if is_adapter(name)]


def check_whole(checkpoint: Checkpoint) -> None:
    """LoadContractError for a checkpoint that holds only adapters, from which no other run can start."""
    weights = [name for name in checkpoint.manifest.by_fqn if name.startswith("model.")]
    if weights and len(adapters_of(weights)) == len(weights):
        base = checkpoint.manifest.config.get("resume", {}).get("from", "")
        raise LoadContractError(
            f"{checkpoint} holds the adapters of {redact(str(base))} alone, not a model to start from. To go on training them, "
            "set save.url to their run and leave resume.from as it was. To start from the two together, merge them: "
            "`titan-ckpt train CHECKPOINT --export-adapter ADAPTER`, then "
            "`titan-ckpt convert to-hf BASE MODEL --merge-lora ADAPTER`"
        )


def export_adapter(checkpoint: Checkpoint, target: str) -> int:
    """Write a checkpoint's adapters as a PEFT folder, for PEFT or `convert to-hf --merge-lora`; returns the number of factors.

    The tokenizer and its chat template, which were trained with, come with them; the digest of the base's values too, so that
    `convert to-hf` merges them into no other base, and says so if they were trained on its codes in NF4.
    AlreadyExistsError if there is something at `target`.
    """
    lora = checkpoint.manifest.config.get("lora", {})
    names = adapters_of(tensor.fqn for tensor in checkpoint.manifest.tensors if tensor.fqn.startswith("model."))
    if not names or not lora.get("rank"):
        raise UsageError(f"{checkpoint} holds no adapters; it is not of a run with [lora]")
    tensors = {f"base_model.model.{name.removeprefix('model.')}": checkpoint.read(name) for name in names}
    store = open_store(target)
    found = next(store.list(), None)
    if found is not None:
        raise AlreadyExistsError(f"{store}: holds {found.path} already; give another name or remove it first")
    base = checkpoint.manifest.training.get(BASE)
    metadata = {"format": "pt"} | ({BASE_DIGEST: str(base["digest"])} if base else {})
    if lora.get("base", "float32") != "float32":
        metadata[BASE_DTYPE] = lora["base"]
    store.write_if("adapter_model.safetensors", _safetensors(tensors, metadata), version=None)
    for name in filter(_OF_TOKENIZER.fullmatch, checkpoint.manifest.assets):
        store.write_if(name, checkpoint.asset(name), version=None)
    store.write_if("adapter_config.json", json.dumps(_peft_config(checkpoint), indent=1).encode(), version=None)
    return len(names)


def _safetensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    try:
        from safetensors.torch import save  # an extra
    except ImportError as error:
        raise MissingExtraError("safetensors", "hf", "writing a PEFT adapter") from error
    data: bytes = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    return data


def _peft_config(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.manifest.config
    base = str(config["resume"]["from"]).partition("?")[0].rstrip("/").rpartition("/")[2]  # no path, host or password
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": config["lora"]["rank"], "lora_alpha": config["lora"]["alpha"],
        "target_modules": list(config["lora"]["targets"]), "bias": "none", "inference_mode": True,
    }  # fmt: skip
