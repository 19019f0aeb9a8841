"""Wrapper subclasses (torchao's quantised weights and optimizer states): saved by their inner tensors, on one and four ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from titan_ckpt.check.diff import diff
from titan_ckpt.check.verify import verify
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.checkpoint.subclasses import put_together
from titan_ckpt.dcp.storage import StorageReader, StorageWriter
from titan_ckpt.errors import DamagedError, LoadContractError, NotFoundError, UnsafeContentError
from titan_ckpt.loading.load import load
from titan_ckpt.resharding.reshard import plan_reshard, run_plan
from titan_ckpt.saving.options import SaveOptions
from titan_ckpt.saving.saver import save
from titan_ckpt.sharding.mesh import MeshSpec
from tools.rank_pool import RankPool

pytestmark = pytest.mark.filterwarnings("ignore")


def _weight(config: str, seed: int) -> torch.Tensor:
    from torchao import quantization

    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(torch.nn.Linear(128, 64, dtype=torch.bfloat16))
    options = {"granularity": quantization.PerGroup(32)} if config == "IntxWeightOnlyConfig" else {}
    settings: Any = getattr(quantization, config)
    quantization.quantize_(model, settings(**options))
    weight: torch.Tensor = model[0].weight.detach()
    return weight


def _mx(seed: int) -> torch.Tensor:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    torch.manual_seed(seed)
    found: torch.Tensor = MXTensor.to_mx(torch.randn(64, 128, dtype=torch.bfloat16), torch.float8_e4m3fn, 32)
    return found


def _step(optimizer: Any) -> None:
    """A step without the compiler, which takes seconds."""
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


def _moment(optimizer: str, seed: int) -> torch.Tensor:
    import torchao.optim

    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(64, 256))
    made = getattr(torchao.optim, optimizer)([weight])
    weight.grad = torch.randn(64, 256)
    _step(made)
    found: torch.Tensor = made.state[weight]["exp_avg"].detach()
    return found


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "int8": lambda seed: _weight("Int8WeightOnlyConfig", seed),
    "int8 with settings": lambda seed: _weight("Int8DynamicActivationInt8WeightConfig", seed),
    "float8": lambda seed: _weight("Float8WeightOnlyConfig", seed),
    "intx": lambda seed: _weight("IntxWeightOnlyConfig", seed),
    "mx": _mx,
    "8 bits": lambda seed: _moment("AdamW8bit", seed),
    "4 bits": lambda seed: _moment("AdamW4bit", seed),
    "fp8": lambda seed: _moment("AdamWFp8", seed),
}


def _bits(tensor: Any) -> Any:
    """All that a tensor of others is made of."""
    names, context = tensor.__tensor_flatten__()
    return type(tensor).__name__, str(context), {name: _raw(getattr(tensor, name)) for name in names}


def _raw(part: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    raw = bytes(part.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return str(part.dtype), tuple(part.shape), raw


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_with_all_its_parts_and_settings(kind: str, tmp_path: Path) -> None:
    old, new = KINDS[kind](1), KINDS[kind](2)
    assert _bits(old) != _bits(new)
    save(str(tmp_path / "run"), {"m": {"w": old}}, step=1)
    load(str(tmp_path / "run"), {"m": {"w": new}})
    opened = open_checkpoint(str(tmp_path / "run"))
    assert _bits(new) == _bits(old) == _bits(opened.read_all()["m"]["w"]) == _bits(opened.read("m.w"))
    assert verify(opened, read_data=True) == []
    run_plan(plan_reshard(opened, MeshSpec.parse("dp_replicate=2")), str(tmp_path / "other"))
    found = diff(opened, open_checkpoint(str(tmp_path / "other")), values=True)
    assert [each.kind for each in found] == ["mesh"]


PLANNED_BY_DCP = [
    kind for kind in KINDS if kind != "intx"
]  # its class does not know `is_pinned`, which DCP's planner asks


@pytest.mark.parametrize("kind", PLANNED_BY_DCP)
def test_dcp_saves_and_loads_it_through_our_storage(kind: str, tmp_path: Path) -> None:
    old, new, newer = (KINDS[kind](seed) for seed in (1, 2, 3))
    dcp.save({"m": {"w": old, "v": torch.ones(3)}, "n": 5}, storage_writer=StorageWriter(f"{tmp_path}@1"))
    state: Any = {"m": {"w": new, "v": torch.zeros(3)}, "n": 0}
    dcp.load(state, storage_reader=StorageReader(str(tmp_path)))
    opened = open_checkpoint(str(tmp_path))
    load(opened, {"m": {"w": newer, "v": torch.zeros(3)}})
    assert _bits(new) == _bits(newer) == _bits(old) == _bits(opened.read_all()["m"]["w"])
    assert (state["m"]["v"].tolist(), state["n"]) == ([1, 1, 1], 5)
    assert verify(opened, read_data=True) == []


def test_dcp_loads_nothing_where_another_kind_is_stored(tmp_path: Path) -> None:
    dcp.save({"w": KINDS["int8"](1), "v": torch.ones(2)}, storage_writer=StorageWriter(f"{tmp_path}@1"))
    state = {"w": KINDS["float8"](2), "v": torch.zeros(2)}
    before = _bits(state["w"])
    with pytest.raises(
        dcp.CheckpointException, match=r"w: checkpoint has a torchao's Int8Tensor, the state torchao's F"
    ):
        dcp.load(state, storage_reader=StorageReader(str(tmp_path)))
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: x"):
        dcp.load({"x": KINDS["int8"](2)}, storage_reader=StorageReader(str(tmp_path)))
    assert _bits(state["w"]) == before
    assert state["v"].tolist() == [0, 0]


def test_other_settings_are_refused_before_anything_changes(tmp_path: Path) -> None:
    save(str(tmp_path), {"w": KINDS["int8"](1), "v": torch.ones(2)}, step=1)
    state = {"w": KINDS["int8 with settings"](2), "v": torch.zeros(2)}
    before = _bits(state["w"])
    with pytest.raises(LoadContractError, match=r"w: checkpoint has settings .*'act_quant_kwargs': None"):
        load(str(tmp_path), state)
    with pytest.raises(
        LoadContractError, match=r"w: checkpoint has a torchao's Int8Tensor, the state torchao's Float8T"
    ):
        load(str(tmp_path), {"w": KINDS["float8"](2), "v": torch.zeros(2)})
    with pytest.raises(LoadContractError, match=r"w: missing from the checkpoint"):
        load(str(tmp_path), {"w": torch.zeros(64, 128), "v": torch.zeros(2)})
    assert _bits(state["w"]) == before
    assert state["v"].tolist() == [0, 0]


class TwoHalves(torch.Tensor):
    """A class of the caller's."""

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor) -> TwoHalves:
        shape = (left.shape[0], left.shape[1] * 2)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=left.dtype)

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["left", "right"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], *_: Any) -> TwoHalves:
        return TwoHalves(parts["left"], parts["right"])

    @classmethod
    def __torch_dispatch__(cls, call: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if call is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{call}")


def test_a_new_optimizer_gets_the_moments_it_has_not(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    old, new = [AdamW8bit([torch.nn.Parameter(torch.ones(64, 256))]) for _ in range(2)]
    weight = old.param_groups[0]["params"][0]
    weight.grad = torch.arange(64 * 256.0).view(64, 256)
    _step(old)
    save(str(tmp_path), {"optimizer": old}, step=1)
    load(str(tmp_path), {"optimizer": new})
    found = new.state[new.param_groups[0]["params"][0]]
    assert _bits(found["exp_avg"]) == _bits(old.state[weight]["exp_avg"])


def test_a_class_of_the_callers_is_made_only_where_it_is_allowed(tmp_path: Path) -> None:
    old = TwoHalves(torch.arange(6.0).view(2, 3), torch.ones(2, 3))
    save(str(tmp_path), {"w": old, "nested": [TwoHalves(torch.ones(1, 1), torch.ones(1, 1))]}, step=1)
    opened, new = open_checkpoint(str(tmp_path)), TwoHalves(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(UnsafeContentError, match=r"TwoHalves.*allow=\[TwoHalves\]"):
        opened.read_all()
    assert _bits(opened.read_all(allow=[TwoHalves])["w"]) == _bits(old)
    load(opened, {"w": new})
    assert _bits(new) == _bits(old)
    assert opened.read("w.left").tolist() == old.left.tolist()
    with pytest.raises(NotFoundError):
        opened.read("x")


def test_a_mark_that_fits_no_parts_is_damage(tmp_path: Path) -> None:
    mark: Any = {
        "class": "torchao.quantization.Int8Tensor",
        "dtype": "bfloat16",
        "shape": [2, 2],
        "parts": ["qdata"],
        "own": {},
    }
    deep: Any = {"a": torch.ones(1), "__subclass__": 1}
    for _ in range(150):
        deep = {"a": deep}
    forged: Any = (
        {"context": {}},
        {"context": [1]},
        {"context": None, "class": "torchao.quantization.quant_primitives.MappingType"},
    )
    for step, parts in enumerate(forged):
        save(str(tmp_path), {"w": {"qdata": torch.ones(2, 2), "v": [mark | parts]}, "deep": deep}, step=step)
        assert open_checkpoint(str(tmp_path)).read_all("w")["v"] == [mark | parts]
        with pytest.raises(DamagedError, match=r"cannot be made of its parts|with the parts"):
            put_together({"qdata": torch.ones(2, 2), "__subclass__": mark | parts}, {}, "x")
    assert open_checkpoint(str(tmp_path)).read_all("deep")["a"]
    for _ in range(sys.getrecursionlimit()):
        deep = {"a": deep}
    with pytest.raises(DamagedError, match="x: nested too deeply"):
        put_together(deep, {}, "x")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


_ROWS, _COLUMNS = Shard(0), Shard(1)
_CUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[Any, ...]]] = {
    "4": ((4,), ("dp_shard",), (_ROWS,)),
    "2 twice": ((2, 2), ("dp_replicate", "dp_shard"), (Replicate(), _ROWS)),
    "2 of 2": ((2, 2), ("dp_shard", "tp"), (_StridedShard(0, split_factor=2), _ROWS)),
    "columns": ((2, 2), ("dp_shard", "tp"), (_ROWS, _COLUMNS)),
}


def _part_of(whole: Any, offsets: list[int], held: list[int]) -> Any:
    """A box of a wrapper subclass, cut by its class; of an optimizer's state, rows."""
    if not hasattr(whole, "codes"):
        for dim in range(2):
            whole = whole.narrow(dim, offsets[dim], held[dim])
        parts, context = whole.__tensor_flatten__()
        made = {name: getattr(whole, name).clone() for name in parts}
    else:
        parts, context = whole.__tensor_flatten__()
        context = [torch.Size(held) if isinstance(each, torch.Size) else each for each in context]
        scale = {name: getattr(whole, name).shape[0] // whole.shape[0] or 1 for name in parts}
        made = {
            name: getattr(whole, name)[offsets[0] * scale[name] :][: held[0] * scale[name]].clone() for name in parts
        }
        made |= {name: getattr(whole, name).clone() for name in parts if name == "qmap"}
    return type(whole).__tensor_unflatten__(made, context, torch.Size(held), None)


def _cut(whole: Any, cut: str, *, is_blank: bool) -> DTensor:
    """A DTensor of a wrapper subclass, with the rows and columns that a mesh gives this rank."""
    sizes, names, placements = _CUTS[cut]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    place, (rows, columns) = list(mesh.get_coordinate() or ()), whole.shape
    offsets, held = [0, 0], [rows, columns]
    order = (1, 0) if cut == "2 of 2" else range(len(sizes))
    for dim in order:
        if not placements[dim].is_replicate():
            held[placements[dim].dim] //= sizes[dim]
            offsets[placements[dim].dim] += held[placements[dim].dim] * place[dim]
    local = _part_of(whole, offsets, held)
    if is_blank:
        for name in local.__tensor_flatten__()[0]:
            getattr(local, name).view(torch.uint8).zero_()
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _through(_rank: int, folder: str, cuts: list[str], kinds: list[str]) -> list[str]:
    """Save and load from cut to cut, into blank tensors; what the last ones have that the first ones of the same cut have not."""
    warnings.simplefilter("ignore")
    wholes = {kind: KINDS[kind](1) for kind in kinds}
    state: Any = {kind: _cut(wholes[kind], cuts[0], is_blank=False) for kind in kinds}
    first = {kind: _bits(state[kind]._local_tensor) for kind in kinds}
    for number, cut in enumerate([*cuts[1:], cuts[0]]):
        save(f"{folder}/{number}", state, step=1, options=SaveOptions(timeout_s=60))
        state = {kind: _cut(wholes[kind], cut, is_blank=True) for kind in kinds}
        load(f"{folder}/{number}", state)
    return [kind for kind in kinds if _bits(state[kind]._local_tensor) != first[kind]]


def _through_dcp(_rank: int, folder: str, cuts: list[str], kinds: list[str]) -> list[str]:
    """As `_through`, by `dcp.save` and `dcp.load` with our storage."""
    warnings.simplefilter("ignore")
    wholes = {kind: KINDS[kind](1) for kind in kinds}
    state: Any = {"m": {kind: _cut(wholes[kind], cuts[0], is_blank=False) for kind in kinds}}
    first = {kind: _bits(state["m"][kind]._local_tensor) for kind in kinds}
    for number, cut in enumerate([*cuts[1:], cuts[0]]):
        dcp.save(state, storage_writer=StorageWriter(f"{folder}/{number}@1"))
        state = {"m": {kind: _cut(wholes[kind], cut, is_blank=True) for kind in kinds}}
        dcp.load(state, storage_reader=StorageReader(f"{folder}/{number}"))
    return [kind for kind in kinds if _bits(state["m"][kind]._local_tensor) != first[kind]]


def _resumed(_rank: int, url: str) -> list[bool]:
    """Whether the states of an 8-bit optimizer under FSDP2 are equal after a load."""
    from torchao.optim import AdamW8bit

    warnings.simplefilter("ignore")
    mesh, jobs = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = torch.nn.Linear(256, 128)
        fully_shard(model, mesh=mesh)
        optimizer = AdamW8bit(model.parameters())
        model(torch.randn(2, 256)).sum().backward()
        _step(optimizer)
        jobs.append({"model": model, "optimizer": optimizer})
    save(url, jobs[0], step=1)
    load(url, jobs[1])
    moments = [
        [each["optimizer"].state[each["model"].weight][name] for each in jobs] for name in ("exp_avg", "exp_avg_sq")
    ]
    return [_bits(a._local_tensor) == _bits(b._local_tensor) for a, b in moments]


@pytest.mark.dist
def test_shards_come_back_through_other_meshes(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_through, str(tmp_path / "rows"), ["4", "2 twice", "2 of 2"], list(KINDS)) == [[]] * 4
    by_columns = ["int8", "float8", "intx", "mx"]
    assert pool.run(_through, str(tmp_path / "columns"), ["columns", "4"], by_columns) == [[]] * 4
    for folder, kinds in (("rows/0", list(KINDS)), ("columns/0", by_columns)):
        found = open_checkpoint(str(tmp_path / folder)).read_all()
        assert {kind: _bits(value) for kind, value in found.items()} == {kind: _bits(KINDS[kind](1)) for kind in kinds}
    assert pool.run(_resumed, str(tmp_path / "job")) == [[True, True]] * 4


@pytest.mark.dist
def test_dcp_moves_shards_to_other_meshes(pool: RankPool, tmp_path: Path) -> None:
    kinds = ["8 bits", "float8"]  # a shard of "int8" does not know `view_as`, as the planner asks
    assert pool.run(_through_dcp, str(tmp_path), ["4", "2 of 2"], kinds) == [[]] * 4
    found = open_checkpoint(str(tmp_path / "0")).read_all()["m"]
    assert {kind: _bits(value) for kind, value in found.items()} == {kind: _bits(KINDS[kind](1)) for kind in kinds}
