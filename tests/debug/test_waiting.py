"""Which stacks are waits: in a collective, or in C++ below a call of torch, in the forms that recorders write."""

from __future__ import annotations

import pytest

from titan_ckpt.debug.incident.frames import main_thread_state
from titan_ckpt.debug.read.stacks import parse_stacks

SITE = "/opt/venv/lib/python3.12/site-packages"
SELECT = '  File "/usr/lib/python3.12/selectors.py", line 415 in select'
IMPORT = '  File "<frozen importlib._bootstrap>", line 241 in _call'
USER = '  File "/job/train.py", line 7 in main'


def frame(place: str, function: str) -> str:
    file, _, line = place.rpartition(":")
    return f'  File "{SITE}/{file}", line {line} in {function}'


def state_of(*lines: str) -> tuple[str, str]:
    text = "\n".join(["Thread 0x1 [MainThread] (most recent call first):", *lines])
    main = parse_stacks(text, "stacks", "").main
    assert main is not None
    kind, call = main_thread_state(main)
    return kind.value, call


BACKWARD = (
    frame("torch/autograd/graph.py:979", "_engine_run_backward"),
    frame("torch/autograd/__init__.py:395", "backward"),
    frame("torch/_tensor.py:623", "backward"),
)


@pytest.mark.parametrize(
    ("lines", "call"),
    [
        (BACKWARD, "backward"),
        ((frame("torch/nn/utils/clip_grad.py:100", "_get_total_norm"),), "_get_total_norm"),
        ((frame("torch/cuda/__init__.py:1000", "synchronize"),), "synchronize"),
        ((frame("torch/optim/adamw.py:300", "_multi_tensor_adamw"), frame("torch/optim/adamw.py:90", "step")), "step"),
        ((*BACKWARD, frame("accelerate/accelerator.py:2861", "backward")), "backward"),
        ((frame("torch/nn/parallel/distributed.py:1775", "_pre_forward"), frame("torch/nn/modules/module.py:1", "forward")),
         "forward"),
    ],
)  # fmt: skip
def test_calls_into_torch_may_wait(lines: tuple[str, ...], call: str) -> None:
    assert state_of(*lines, USER) == ("in_torch", call)


@pytest.mark.parametrize("text", ["log(loss.item())", "torch.cuda.synchronize()", "norms.cpu()", "x = y.tolist()"])
def test_calls_without_a_frame_may_wait(text: str) -> None:
    assert state_of(f"{USER}  | {text}")[0] == "in_torch"


@pytest.mark.parametrize(
    "lines",
    [
        (SELECT, frame("torch/utils/data/dataloader.py:1131", "_try_get_data")),
        (frame("torch/utils/data/dataloader.py:701", "__next__"),),
        (frame("torch/_inductor/codecache.py:50", "load"),),
        (frame("torch/serialization.py:900", "save"),),
        (IMPORT, frame("torch/distributed/_symmetric_memory/__init__.py:1", "<module>")),
        (),
    ],
)  # fmt: skip
def test_python_code_and_files_are_no_wait(lines: tuple[str, ...]) -> None:
    assert state_of(*lines, f"{USER}  | batch = next(loader)") == ("on_cpu", "")


def test_pyspy_stack_below_torch_may_wait() -> None:
    inner = f"    _engine_run_backward ({SITE}/torch/autograd/graph.py:979)"
    main = parse_stacks(f'Thread 1 (active): "MainThread"\n{inner}\n    main (/job/train.py:7)\n', "pyspy", "").main
    assert main is not None
    assert main_thread_state(main)[0] == "in_torch"
