"""The seam of the model: how to build it, and how each kind of parallelism divides it, by patterns of FQNs.

Nothing here computes. `parallel/plan.py` compares a spec with the model it builds, on the meta device, before a rank starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.seams.boundary import kind_of
from titan_ckpt.trainer.seams.loss import CrossEntropy, Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Inside this module a rank has some of the heads or features, outside it has all of them.

    The module's first argument is the hidden states [B, S, D], gathered along S under sequence parallelism; its (first) output
    is a partial sum, as that of a Rowwise projection, and is summed over tp.
    """

    divided: tuple[str, ...] = ()  # its own weights that are cut along dimension 0, such as a number for each head


@dataclass(frozen=True, slots=True, kw_only=True)
class Colwise:
    """An nn.Linear in a region whose outputs are divided: weight and bias are cut along dimension 0, in multiples of `unit`."""

    unit: int = 1  # rows that stay together, such as those of one head
    of: str = "outputs"  # what a unit is called in errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Rowwise:
    """An nn.Linear in a region whose inputs are divided: the weight is cut along dimension 1, in multiples of `unit`."""

    unit: int = 1
    of: str = "inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """An nn.Embedding whose rows are divided; the look-ups of all ranks are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An nn.Linear or `LmHead` at the end whose outputs are divided.

    The logits of an nn.Linear are gathered; an `LmHead` that gets the labels computes their loss from the parts.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Whole weights that act on a part of the tokens or heads, such as norms; their gradients are summed over tp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A module outside regions that every rank computes in whole, on all tokens."""


Rule: TypeAlias = Region | Colwise | Rowwise | Vocab | Head | Shared | Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Initial values: normal with this standard deviation, the same on every mesh."""

    std: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Initial values: one number."""

    value: float


Initial: TypeAlias = Normal | Constant


def usual_initial(fqn: str) -> Initial:
    """Normal(0.02) for weights; 1 for those of norms (`norm` or `ln` in the module's name), 0 for biases."""
    module, _, name = fqn.rpartition(".")
    if name == "bias":
        return Constant(value=0.0)
    last = module.rpartition(".")[2]
    is_norm = name == "weight" and ("norm" in last or last.startswith("ln"))
    return Constant(value=1.0) if is_norm else Normal(std=0.02)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelSpec:
    """A model for the trainer. Patterns: `*` within one name of an FQN, `**` across names.

    `forward` takes the field `inputs[0]` of a batch by position, the other `inputs` by name where the batch has them, and
    returns what the loss takes. It must pass hidden states [B, S, ...] from the `first` modules through the `blocks` to the
    `last` modules, each taking them as its first argument and returning them: a pipeline stage is the same model, in which
    modules of other stages return their first argument as it is.
    """

    name: str
    build: Callable[[], nn.Module]  # the whole model; called on the meta device, so it takes no memory
    inputs: tuple[str, ...]  # fields of a batch that `forward` takes
    blocks: str  # pattern of the blocks: the unit of FSDP, recomputation, compilation and pipeline stages
    first: tuple[str, ...] = ()  # patterns of modules before the blocks: on the first stage
    last: tuple[str, ...] = ()  # patterns of modules after the blocks: on the last stage
    units: str = ""  # pattern of modules in `last` that are units of FSDP, recomputation and compilation, as blocks are
    loss: Loss = field(default_factory=CrossEntropy)
    tensor: Mapping[str, Rule] = field(default_factory=dict)  # what tp does with a module; empty: tp is refused
    attention: str = ""  # pattern of modules whose attribute `attend` is an `Attend`; empty: cp is refused
    experts: str = (
        ""  # pattern of modules whose weights are all [experts, ...], such as `Experts`; empty: ep is refused
    )
    sequence: tuple[
        str, ...
    ] = ()  # fields [B, S, ...] of a batch that cp cuts; `positions` [B, S] is added if it is an input
    # Fields computed from those of a whole batch, before cp cuts it; their names are also in inputs and sequence.
    derived: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    tied: Mapping[str, str] = field(default_factory=dict)  # weight -> the weight it is
    initial: Callable[[str], Initial] = usual_initial
    fill_buffers: Callable[[nn.Module], None] | None = None  # computes the buffers, which building on meta leaves empty
    config: Any = None  # a dataclass; recorded in checkpoints, and another one is refused at a resume
    vocab_size: int | None = None  # token ids that the model knows
    max_seq_len: int | None = None
    flops_per_token: Callable[[int], float] | None = None  # of forward and backward, from the sequence length

    def __post_init__(self) -> None:
        if self.config is not None and (isinstance(self.config, type) or not is_dataclass(self.config)):
            raise ConfigError(f"ModelSpec({self.name!r}).config is {kind_of(self.config)}, expected a dataclass")
