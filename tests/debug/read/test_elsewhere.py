"""Texts of launchers, trainers and servers that other people run, as their users paste them: who is accused, and who never.

`tests/data/elsewhere.txt` holds them, each behind a line `==== name: truth`: `accused 2`, `suspects 2`, `nobody` (a fault, but
the text does not show whose), `well`. They are written after the formats of Lightning's process observer, vLLM's and SGLang's
workers, DeepSpeed, Megatron-LM, Ray, torchx, MosaicML's composer, Horovod, SageMaker, MPI, Slurm, Kubernetes, torch's spawn,
ProcessGroupWrapper and watchdogs; none is copied. `<CR>` is a carriage return.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from tools.paths import DATA

_PARTS = re.split(r"(?m)^==== (.+): (accused|suspects|nobody|well) ?([\d,]*)\n", (DATA / "elsewhere.txt").read_text())[
    1:
]
PIECES = {name: (truth, ranks, text) for name, truth, ranks, text in zip(*(iter(_PARTS),) * 4, strict=True)}


@pytest.mark.parametrize("name", PIECES)
def test_text_of_other_peoples_jobs(name: str, tmp_path: Path) -> None:
    truth, ranks, text = PIECES[name]
    (tmp_path / "train.log").write_text(text.replace("<CR>", "\r"), newline="")
    top = diagnose(open_run(str(tmp_path)))[0]
    expected = tuple(int(rank) for rank in ranks.split(",") if rank)
    assert top.culprits == (expected if truth == "accused" else ())
    assert truth != "suspects" or top.suspects == expected
    assert (top.verdict in ("HEALTHY", "RUNNING", "STRAGGLER")) == (truth == "well")
