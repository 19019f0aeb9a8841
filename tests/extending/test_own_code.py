"""Mistakes in a user's own module: exit code 2 and one line that names file, line and seam, never an internal error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_ckpt.cli.main import main

pytestmark = pytest.mark.repeats
GOOD = """
from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
from titan_ckpt.trainer import *

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.proj(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block()])
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

SPEC = dict(name="net", build=lambda: Net(), inputs=("tokens",), blocks="blocks.*", first=("embed",), last=("head",))
model = ModelSpec(**SPEC)

class Source:
    fingerprint = "numbers"
    def __len__(self):
        return 16
    def sample(self, index):
        return {"tokens": torch.arange(4) % 8, "labels": torch.arange(4) % 8}

def data(config):
    return Source()

class OwnLoss:
    def __call__(self, output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    def count(self, batch):
        return batch["labels"].numel()
"""

# What a module adds to GOOD; what the error must say after the file's name and the line's number.
MISTAKES = {
    "import": ("1 / 0", "ZeroDivisionError"),
    "syntax": ("def f(:", "SyntaxError"),
    "exit": ("raise SystemExit(4)", r"SystemExit\(4\)"),
    "model-is-number": ("model = 3", "model is 3, expected"),
    "model-annotation": ("def model(config: Missing): ...", "NameError"),
    "model-no-record": ("def model(config): ...", "must be annotated"),
    "model-raises": (
        "@dataclass(frozen=True)\nclass C:\n    dim: int = 4\ndef model(config: C):\n    raise ValueError('no model')",
        "in model: model raised ValueError: no model",
    ),
    "model-none": (
        "@dataclass(frozen=True)\nclass C:\n    dim: int = 4\ndef model(config: C):\n    pass",
        "model returned None, expected a ModelSpec",
    ),
    "record-raises": (
        "@dataclass(frozen=True)\nclass C:\n    dim: int = 4\n    def __post_init__(self):\n        raise ValueError('dim!')\n"
        "def model(config: C): ...",
        "in __post_init__: a table's record raised ValueError: dim!",
    ),
    "build-raises": (
        "def build():\n    return nn.Linear(3)\nmodel = ModelSpec(**SPEC | dict(build=build))",
        "ModelSpec.build raised",
    ),
    "build-none": ("model = ModelSpec(**SPEC | dict(build=lambda: None))", "expected an nn.Module"),
    "blocks-type": ("model = ModelSpec(**SPEC | dict(blocks=3))", "ModelSpec.blocks is 3, expected a text"),
    "inputs-type": ("model = ModelSpec(**SPEC | dict(inputs='tokens'))", "expected a tuple of texts"),
    "pattern": ("model = ModelSpec(**SPEC | dict(blocks='blocks.[z-a]'))", "is not a pattern"),
    "rule": ("model = ModelSpec(**SPEC, tensor={'embed': Vocab})", "expected a rule"),
    "unit-negative": ("model = ModelSpec(**SPEC, tensor={'head': Colwise(unit=-4)})", "unit must be a whole number"),
    "unit-zero": ("model = ModelSpec(**SPEC, tensor={'head': Colwise(unit=0)})", "unit must be a whole number"),
    "unit-true": ("model = ModelSpec(**SPEC, tensor={'head': Rowwise(unit=True)})", "unit must be a whole number"),
    "initial-raises": ("model = ModelSpec(**SPEC, initial=lambda fqn: {}[fqn])", "ModelSpec.initial.*KeyError"),
    "initial-type": ("model = ModelSpec(**SPEC, initial=lambda fqn: 0.02)", "expected Normal or Constant"),
    "initial-nan": (
        "model = ModelSpec(**SPEC, initial=lambda fqn: Normal(std=float('nan')))",
        "expected a finite number",
    ),
    "forward-raises": (
        "def fail(self, tokens):\n    return tokens @ tokens.missing\nNet.forward = fail",
        "in fail: net: forward",
    ),
    "forward-shape": (
        "Net.forward = lambda self, tokens: self.head(self.embed(tokens)[..., :3])",
        "net: forward raised RuntimeError",
    ),
    "forward-signature": ("Net.forward = lambda self: 1", "net: forward raised TypeError"),
    "forward-in-place": (
        "def fail(self, tokens):\n    x = self.embed(tokens).exp()\n    y = x.exp()\n    y.mul_(2)\n"
        "    return self.head(y * y.sin_())\n"
        "Net.forward = fail",
        "net: backward raised RuntimeError: one of the variables",
    ),
    "no-such-field": ("model = ModelSpec(**SPEC | dict(inputs=('words',)))", "which the batch lacks"),
    "loss-type": ("loss = 3", "loss is 3, expected"),
    "loss-class": ("loss = OwnLoss", "is the class OwnLoss"),
    "loss-no-count": ("def loss(config):\n    return lambda output, batch: 0", "has no method count"),
    "loss-raises": ("OwnLoss.__call__ = lambda self, output, batch: output['x']\nloss = OwnLoss()", "Loss raised"),
    "loss-none": (
        "OwnLoss.__call__ = lambda self, output, batch: None\nloss = OwnLoss()",
        "Loss returned None, expected a tensor",
    ),
    "loss-constant": (
        "OwnLoss.__call__ = lambda self, output, batch: output.detach().sum()\nloss = OwnLoss()",
        "depends on no weight",
    ),
    "loss-shape": (
        "OwnLoss.__call__ = lambda self, output, batch: output.sum(-1)\nloss = OwnLoss()",
        r"Loss returned a tensor of shape \[1, 4\], expected one number: the sum of the losses",
    ),
    "count-zero": (
        "OwnLoss.count = lambda self, batch: 0\nloss = OwnLoss()",
        r"own.py:\d+: Loss.count is 0 over the whole batch of step 1, samples 0 and following: nothing is learned",
    ),
    "labels-none": (
        "Source.sample = lambda self, i: {'tokens': torch.arange(4) % 8, 'labels': torch.full((4,), -100)}",
        "Loss.count is 0 over the whole batch of step 1",
    ),
    "count-negative": ("OwnLoss.count = lambda self, batch: -1\nloss = OwnLoss()", "Loss.count returned -1"),
    "count-nan": ("OwnLoss.count = lambda self, batch: float('nan')\nloss = OwnLoss()", "Loss.count returned nan"),
    "count-raises": ("OwnLoss.count = lambda self, batch: batch['no']\nloss = OwnLoss()", "Loss.count raised KeyError"),
    "data-raises": ("def data(config):\n    return open('/no/such/file')", "in data: data raised FileNotFoundError"),
    "data-none": ("def data(config):\n    pass", "expected a DataSource"),
    "data-empty": ("Source.__len__ = lambda self: 0", "len is 0"),
    "data-negative": ("Source.__len__ = lambda self: -3", "len raised ValueError"),
    "sample-raises": ("Source.sample = lambda self, i: [][i]", r"sample\(\d+\) raised IndexError"),
    "sample-type": ("Source.sample = lambda self, i: torch.zeros(4)", "expected fields by name"),
    "sample-list": ("Source.sample = lambda self, i: {'tokens': [1, 2]}", "expected a tensor"),
    "sample-shapes": (
        "Source.sample = lambda self, i: {'tokens': torch.arange(i + 1) % 8, 'labels': torch.arange(i + 1) % 8}",
        "has another form than the first",
    ),
    "fingerprint": ("Source.fingerprint = None", "fingerprint is None"),
    "per-sample": ("Source.losses_per_sample = 0.5", "losses_per_sample is 0.5"),
    "schedule-type": ("schedule = 0.5", "schedule is 0.5"),
    "schedule-raises": (
        "def schedule(step, total):\n    return 1 / step",
        r"in schedule: schedule\(0, 2\) raised ZeroDivisionError",
    ),
    "schedule-nan": ("schedule = lambda step, total: float('nan')", "returned nan, expected a share"),
    "schedule-signature": ("schedule = lambda step: 1.0", "raised TypeError"),
    "prepare-raises": (
        "def prepare(batch, frozen):\n    return frozen['teacher'](batch)",
        "in prepare: prepare raised KeyError",
    ),
    "prepare-none": ("def prepare(batch, frozen):\n    pass", "prepare returned None, expected fields"),
    "frozen-type": (
        "def prepare(batch, frozen):\n    return batch\nfrozen = {'a': lambda config: 3}",
        "expected a FrozenModel",
    ),
    "metrics-type": ("metrics = [OwnLoss()]", "metrics is a list"),
    "metric-no-count": ("metrics = {'a': lambda o, b: o.sum()}", "has no method count"),
    "tables-type": ("tables = {'mine': 3}", "tables: 'mine' is 3"),
    "validation-type": ("validation = {'a': 3}", "validation: 'a' is 3"),
}


def _run(folder: Path, source: str, *more: str) -> int:
    (folder / "own.py").write_text(GOOD + source + "\n")
    (folder / "c.toml").write_text('[data]\nseq_len = 4\n[train]\nsteps = 2\nglobal_batch_size = 2\ndevice = "cpu"\n')
    sets = [f"log.folder={folder}/run", "log.tensorboard=false", "log.progress=false", "debug.recorder=false", *more]
    options = [word for text in sets for word in ("--set", text)]
    return main(["train", str(folder / "c.toml"), "--module", str(folder / "own.py"), *options])


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_own_code_is_one_line(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, said = MISTAKES[kind]
    code = _run(tmp_path, source)
    shown = capfd.readouterr().err
    (line,) = [text for text in shown.splitlines() if text.startswith("titan-ckpt: error: ")] or [shown]
    assert (code, "internal error" in shown) == (2, False), shown

    assert re.search(said, line), line
