"""What a user puts in place of the trainer's own parts, and the config that goes with it.

A module given by `train CONFIG --module FILE.py` defines any of the names in `Extension`; `run(config, model=..., loss=...)`
takes the same. `model` and `data` may be functions of the config; the type of `model`'s argument is the record that the
table `[model]` is read into, with the same checks as every other table.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

import torch

from titan_ckpt.errors import ConfigError, TitanError
from titan_ckpt.trainer.model.decoder import decoder
from titan_ckpt.trainer.seams.boundary import blamed, calling, describe_error, kind_of, refuse
from titan_ckpt.trainer.seams.data import DataSource
from titan_ckpt.trainer.seams.loss import Loss
from titan_ckpt.trainer.seams.model import ModelSpec
from titan_ckpt.trainer.seams.optimizer import OptimizerSpec, Schedule
from titan_ckpt.trainer.seams.step import FrozenModel, Hooks, Prepare, TrainStep
from titan_ckpt.trainer.seams.validation import Metric, Validator


@dataclass(frozen=True)
class NoSettings:
    """The table `[model]` of a model that has no settings."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """The parts of a run that are not the trainer's own; the defaults are."""

    model: ModelSpec | Callable[[Any], ModelSpec] = decoder
    loss: Loss | Callable[[Any], Loss] | None = None  # or a function of the whole config; None: the model's own
    data: Callable[[Any], DataSource] | None = None  # from the whole config; None: the corpora of [data]
    validation: Mapping[str, Callable[[Any], DataSource]] = field(default_factory=dict)  # sets, beside held-out samples
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # beside the loss, in validation
    validator: Validator | None = None  # what is computed from each set; None: the means of loss and metrics
    optimizer: OptimizerSpec | None = None  # None: `optimizer.name`
    schedule: Schedule | None = None  # None: `optimizer.schedule`
    frozen: Mapping[str, Callable[[Any], FrozenModel]] = field(default_factory=dict)  # second models, from the config
    prepare: Prepare | None = None  # called with each microbatch
    hooks: Hooks | None = None  # calls around each step
    train_step: TrainStep | None = None  # forward and backward of a step; None: of each microbatch
    tables: Mapping[str, type] = field(default_factory=dict)  # own tables of the config: name -> frozen dataclass
    source: str = ""  # the module it comes from, for ranks that are started

    @property
    def is_empty(self) -> bool:
        """Whether everything is the trainer's own."""
        own = (
            self.loss,
            self.data,
            self.validator,
            self.optimizer,
            self.schedule,
            self.prepare,
            self.hooks,
            self.train_step,
        )
        return (
            self.model is decoder
            and own == (None,) * len(own)
            and not (self.tables or self.frozen or self.validation or self.metrics)
        )

    def model_record(self) -> type:
        """The dataclass that `[model]` is read into."""
        if isinstance(self.model, ModelSpec):
            return NoSettings
        with calling("model: its annotations", self.model):
            hints = get_type_hints(self.model)
            names = [name for name in inspect.signature(self.model).parameters if name in hints]
        record = hints[names[0]] if len(names) == 1 else None
        return _checked_record(record, "model: its one argument must be annotated with the record of [model]")

    def spec(self, record: Any) -> ModelSpec:
        """The model of a table `[model]`; the same object for an equal record."""
        if isinstance(self.model, ModelSpec):
            return self.model
        with calling("model", self.model):
            return _spec(self.model, record)


@functools.lru_cache(maxsize=16)
def _spec(build: Callable[[Any], ModelSpec], record: Any) -> ModelSpec:
    spec: object = build(record)
    if not isinstance(spec, ModelSpec):
        refuse("model", build, f"returned {kind_of(spec)}, expected a ModelSpec")
    return spec if spec.config is not None else dataclasses.replace(spec, config=record)


def _checked_record(record: Any, what: str) -> type:
    is_record = isinstance(record, type) and dataclasses.is_dataclass(record)
    if not is_record or not record.__dataclass_params__.frozen:
        raise ConfigError(f"{what}, a dataclass(frozen=True); found {record!r}")
    assert isinstance(record, type)
    return record


RECORDED = ("event", "time_s", "step", "seconds", "set")  # fields of a record of validation beside its numbers


def check_parts(extension: Extension, taken: tuple[str, ...]) -> None:
    """ConfigError for parts that are no such thing, and for tables and metrics that have names of the trainer's (`taken`)."""
    _check_kinds(extension)
    for name in extension.metrics:
        if name in (*RECORDED, "loss", "tokens"):
            raise ConfigError(f"metrics: {name!r} is a field of every record of validation; choose another name")
    for name, record in extension.tables.items():
        _checked_record(record, f"tables: {name!r}: expected a record")
        if name in taken:
            raise ConfigError(f"tables: {name!r} is a table of the trainer; choose another name")


def _check_kinds(extension: Extension) -> None:
    _check_optimizer(extension.optimizer)
    if extension.hooks is not None and not isinstance(extension.hooks, Hooks):
        raise ConfigError(f"hooks is {kind_of(extension.hooks)}, expected an object of a subclass of Hooks")
    for name in ("model", "loss", "data", "validator", "schedule", "prepare", "train_step"):
        part = getattr(extension, name)
        if part is not None and not callable(part) and not isinstance(part, ModelSpec):
            raise ConfigError(
                f"{name} is {kind_of(part)}, expected a function, or an object that docs/extending.md describes"
            )
    for name in ("validation", "frozen", "metrics", "tables"):
        parts = getattr(extension, name)
        if not isinstance(parts, Mapping) or not all(isinstance(key, str) for key in parts):
            raise ConfigError(f"{name} is {kind_of(parts)}, expected a dict: name -> {name}")
        for key, part in parts.items():
            if not callable(part):
                raise ConfigError(f"{name}: {key!r} is {kind_of(part)}, expected a function or an object with __call__")
    made = {"loss": extension.loss, "validator": extension.validator}
    for key, part in (*made.items(), *((f"metrics[{n!r}]", m) for n, m in extension.metrics.items())):
        if isinstance(part, type):
            raise ConfigError(f"{key} is the class {part.__name__}, expected an object: {part.__name__}(...)")
        if key not in made and not hasattr(part, "count"):
            raise ConfigError(
                f"{key}: {part!r:.80} has no method count; titan_ckpt.trainer.Loss shows what a metric has"
            )


def _check_optimizer(spec: object) -> None:
    if spec is None:
        return
    if not isinstance(spec, OptimizerSpec):
        raise ConfigError(f"optimizer is {kind_of(spec)}, expected an OptimizerSpec")
    if not callable(spec.update) or not isinstance(spec.name, str) or not spec.name:
        raise ConfigError(f"optimizer: OptimizerSpec({spec.name!r}): name must be a text, update a function")
    for name, dtype in spec.state.items():
        if not isinstance(dtype, torch.dtype) or name in ("step", "ema") or not str(name).isidentifier():
            raise ConfigError(
                f"optimizer: OptimizerSpec({spec.name!r}).state: {name!r}: {dtype!r:.80}: expected a name other than step and "
                "ema, and a torch dtype"
            )


_NEAR = 0.85  # of difflib's ratio: `losss` and `metric` are, `losses` is not
ENTRY_POINTS = "titan_ckpt.trainer"  # the group in which installed packages offer modules by name


def load_extension(source: str) -> Extension:
    """The extension of a Python file, an installed package's entry point, or an importable module, in this order.

    ConfigError if it cannot be loaded or defines nothing.
    """
    offered = _entry_point(source)
    found: object = _import(source) if offered is None else offered
    names = [f.name for f in dataclasses.fields(Extension) if f.name != "source" and hasattr(found, f.name)]
    if not names:
        known = ", ".join(f.name for f in dataclasses.fields(Extension) if f.name != "source")
        raise ConfigError(f"--module {source}: defines none of {known}")
    _check_spelling(source, found)
    return Extension(source=source, **{name: getattr(found, name) for name in names})


def _check_spelling(source: str, found: object) -> None:
    """ConfigError for a name of the module's own that is nearly one that the trainer reads: it would be left out silently."""
    read = [f.name for f in dataclasses.fields(Extension) if f.name != "source" and not hasattr(found, f.name)]
    for name, value in vars(found).items() if isinstance(found, ModuleType) else ():
        is_imported = isinstance(value, type | FunctionType) and value.__module__ != vars(found)["__name__"]
        if name.startswith("_") or is_imported or isinstance(value, ModuleType):
            continue
        if near := get_close_matches(name, read, 1, _NEAR):
            raise ConfigError(
                f"--module {source}: defines {name}, which the trainer does not read; did you mean {near[0]}? If not, begin it "
                f"with an underscore"
            )


def _entry_point(source: str) -> object | None:
    """What an installed package offers under this name: a module, or an object with the same names; None if nothing."""
    offered = metadata.entry_points(group=ENTRY_POINTS, name=source)
    values = sorted({each.value for each in offered})
    if len(values) > 1:
        raise ConfigError(
            f"--module {source}: several installed packages offer it ({', '.join(values)}); name the module instead"
        )
    if not values:
        return None
    with _importing(f"{source} ({values[0]})"):
        loaded: object = next(iter(offered)).load()
    return loaded


def _import(source: str) -> ModuleType:
    with _importing(source):
        if not source.endswith(".py"):
            with _findable(os.getcwd()):
                return importlib.import_module(source)
        path = os.path.abspath(source)
        name = os.path.basename(path).removesuffix(".py")
        if name in sys.modules or name in sys.stdlib_module_names:
            name = f"own_{name}"  # a module of that name exists
        found = importlib.util.spec_from_file_location(name, path)
        if found is None or found.loader is None or not os.path.isfile(path):
            raise ConfigError(f"--module {source}: no such file")
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module  # dataclasses look their module up there
        with _findable(os.path.dirname(path)):
            found.loader.exec_module(module)
        return module


@contextmanager
def _findable(folder: str) -> Iterator[None]:
    """Modules of a folder can be imported, as those beside a script."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


@contextmanager
def _importing(what: str) -> Iterator[None]:
    """Turn what an import of the user's code raises into a ConfigError."""
    try:
        yield
    except TitanError:
        raise
    except (Exception, SystemExit) as error:
        cause = blamed(error, "the import")
        text = str(cause) if isinstance(cause, TitanError) else describe_error(error)
        raise ConfigError(f"--module {what}: cannot be imported: {text}") from error
