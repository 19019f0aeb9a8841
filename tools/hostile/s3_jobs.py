"""Whole jobs against a hostile S3 server: save, load, list, verify, copy, prune, reshard, convert, with a wrong answer anywhere.

Whatever the server answers, a job ends in time; one that reports success has done what it says; and every checkpoint that it was
not asked to remove is still whole, as an honest look shows afterwards.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from titan_ckpt.cli.main import main
from titan_ckpt.converters.hf.config import spec_from_hf
from titan_ckpt.converters.hf.safetensors_header import encode_header
from titan_ckpt.converters.models.families import expected_tensors
from titan_ckpt.errors import TitanError
from titan_ckpt.loading.load import load
from titan_ckpt.saving.saver import SaveOptions, Saver
from titan_ckpt.store import open as open_module
from titan_ckpt.store.base import RetryPolicy
from tools.hostile.s3_calls import Seen
from tools.hostile.s3_server import HostileS3, Rule, honest

RUN, COPY, WIDE, MODEL, OUT = (f"s3://bucket/{name}" for name in ("run", "copy", "wide", "model", "out"))
HASTY = RetryPolicy(tries=3, first_wait_s=0.0001, longest_wait_s=0.001, deadline_s=1.0)
PATIENT = RetryPolicy()
LONGEST_S = 60.0
STEPS = (1, 2, 3)
INCOMPLETE = ("prune", RUN, "--keep-last", "3", "--incomplete", "--older-than", "0s", "--yes")
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu",
    "torch_dtype": "float32",
}  # fmt: skip


def state_of(step: int) -> dict[str, Any]:
    """Tensors that encode the step, one that never changes, and a value."""
    changing = {f"w{n}": torch.arange(16.0 * (n + 2)).reshape(16, n + 2) + 1000 * step for n in range(4)}
    return {"model": changing, "frozen": torch.arange(300.0), "step": step}


def _save(url: str, step: int) -> int:
    with Saver(url, SaveOptions(incremental=True, timeout_s=40)) as saver:
        saver.save_now(state_of(step), step=step, assets={"tokenizer.json": b"{}"})
    return 0


def is_right(url: str, step: int) -> bool:
    """Whether a checkpoint loads with the values that were saved."""
    state = state_of(0)
    load(f"{url}@{step}", state)
    expected = state_of(step)
    tensors = {**expected["model"], "frozen": expected["frozen"]}
    found = {**state["model"], "frozen": state["frozen"]}
    return state["step"] == step and all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def _command(*arguments: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main([*arguments])


def _load(url: str) -> int:
    if not is_right(url, STEPS[-1]):
        raise AssertionError("load returned wrong values")
    return 0


@dataclass(frozen=True, slots=True)
class Job:
    """A job; after exit code 0, `did` must be true; `kept` are the steps of the run that must be whole afterwards."""

    name: str
    run: Callable[[], int]
    did: Callable[[], bool]
    kept: tuple[int, ...] = STEPS


def _same_export(server: HostileS3, wanted: dict[str, bytes]) -> bool:
    found = server.memory.objects
    return all(found.get(key) == data for key, data in wanted.items() if key.endswith(".safetensors"))


class Jobs:
    """The jobs, and a server with a run of three steps and a model."""

    def __init__(self, server: HostileS3) -> None:
        self.server, self.policy = server, PATIENT
        for step in STEPS:
            _save(RUN, step)
        self._put_hugging_face()
        assert _command("convert", "from-hf", "s3://bucket/hf", MODEL) == 0
        self.start = server.memory.objects
        assert _command("convert", "to-hf", MODEL, OUT) == 0
        self.exported = {key: data for key, data in server.memory.objects.items() if key.startswith("out/")}
        assert any(key.endswith(".safetensors") for key in self.exported)
        always_true = lambda: True
        self.all = [
            Job("save", lambda: _save(RUN, 4), lambda: is_right(RUN, 4)),
            Job("load", lambda: _load(RUN), always_true),
            Job("ls", lambda: _command("ls", RUN), always_true),
            Job("inspect", lambda: _command("inspect", RUN), always_true),
            Job("verify --data", lambda: _command("verify", "--data", RUN), always_true),
            Job("cp", lambda: _command("cp", f"{RUN}@2", COPY), lambda: is_right(COPY, 2)),
            Job("prune", lambda: _command("prune", RUN, "--keep-last", "1", "--yes"), always_true, STEPS[-1:]),
            Job("prune --incomplete", lambda: _command(*INCOMPLETE), always_true),
            Job("reshard", lambda: _command("reshard", RUN, WIDE, "--mesh", "dp_shard=3"), lambda: is_right(WIDE, 3)),
            Job("to-hf", lambda: _command("convert", "to-hf", MODEL, OUT), lambda: _same_export(server, self.exported)),
            Job("diff", lambda: _command("diff", "--values", f"{RUN}@2", f"{RUN}@3"), lambda: False),
        ]

    def _put_hugging_face(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = expected_tensors(spec_from_hf(MODEL_CONFIG, "here"))
        tensors = [torch.randn(shape, generator=generator) for shape in shapes.values()]
        header = encode_header([(name, "float32", shape) for name, shape in shapes.items()], {"format": "pt"})
        data = header + b"".join(tensor.numpy().tobytes() for tensor in tensors)
        self.server.memory.put("hf/config.json", json.dumps(MODEL_CONFIG).encode())
        self.server.memory.put("hf/model.safetensors", data)

    def _start_over(self) -> None:
        self.server.start_over(self.start)
        os.environ["AWS_ACCESS_KEY_ID"] = self.server.options["access_key"]

    def count(self, job: Job) -> int:
        """Requests of an honest run of the job."""
        self._start_over()
        self.server.rule = honest
        job.run()
        return self.server.operations.total()

    def run(self, job: Job, rule: Rule) -> Seen:
        """Run a job under `rule`, then look honestly at what is left."""
        self._start_over()
        self.server.rule, self.policy = rule, HASTY
        started = time.monotonic()
        try:
            code, problem = job.run(), ""
        except TitanError:
            code, problem = 3, ""
        except Exception as error:  # noqa: BLE001  (an uncaught error is a finding)
            code, problem = 70, f"{type(error).__name__}: {error}"
        seconds, num_shaped = time.monotonic() - started, self.server.num_shaped
        self.server.rule, self.policy = honest, PATIENT
        problem = problem or self._judge(job, code, seconds)
        return Seen("not reached" if not num_shaped else "right" if code == 0 else "error", seconds, problem)

    def _judge(self, job: Job, code: int, seconds: float) -> str:
        try:
            if code == 0 and not job.did():
                return "reported success, but did not do its work"
        except TitanError as error:
            return f"reported success, but left nothing to open: {error}"
        for step in job.kept:
            try:
                if not is_right(RUN, step):
                    return f"step {step} has wrong values"
            except TitanError as error:
                return f"step {step} is lost: {error}"
        return f"took {seconds:.1f} s" if seconds > LONGEST_S else ""


@contextlib.contextmanager
def hostile_jobs() -> Iterator[Jobs]:
    """A server with its jobs; `s3://` URLs of this process lead to it, with short deadlines."""
    with HostileS3() as server:
        keys = {
            "AWS_ACCESS_KEY_ID": server.options["access_key"],
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "us-east-1",
        }
        environment = patch.dict(os.environ, {"AWS_ENDPOINT_URL": server.endpoint, **keys})
        with environment:
            jobs = Jobs(server)

            class Current(RetryPolicy):
                def __new__(cls) -> RetryPolicy:  # type: ignore[misc]
                    return jobs.policy

            with patch.object(open_module, "RetryPolicy", Current):
                yield jobs
