"""Peers that are killed and that join: the crew forms anew and goes on from its checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from examples.phones.choices import Choices
from examples.phones.crew import free_port, is_ready
from examples.phones.pictures import pictures_in, read_truth
from examples.phones.progress import AXIS, Crew
from examples.phones.score import adjusted_rand_index
from examples.phones.stages import Album, run_pipeline
from tests.phones.conftest import NUM_SCENES
from titan_ckpt import open_store
from tools.paths import ROOT

CHOICES: dict[str, Any] = {
    "features": "gradients", "width": 160, "words": 48, "sample": 0.5, "batch": 32, "iterations": 4, "block": 4,
    "clusters": NUM_SCENES, "restarts": 3,
}  # fmt: skip

pytest.importorskip("cv2", reason="needs minutes of a busy machine: `make phones` runs it")
pytestmark = pytest.mark.dist


@dataclass(slots=True)
class Peer:
    """A peer in a session of its own, and what it has said."""

    address: str
    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def until(self, event: str, **details: Any) -> dict[str, Any]:
        """Read on up to an event with these details."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if {"event": event, **details}.items() <= self.events[-1].items():
                return self.events[-1]
        raise AssertionError(f"{self.address} ended before {event} {details}: {self.events}")


def _start(stack: ExitStack, folder: Path, album: Path, book: list[str], number: int) -> Peer:
    command = [sys.executable, "-m", "examples.phones.peer", "--address", book[number], "--book", ",".join(book)]
    command += ["--home", str(folder / f"peer{number}"), "--album", str(album), "--choices", json.dumps(CHOICES)]
    command += ["--save-every", "0", "--look-every", "0.2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    process = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    )
    stack.callback(_kill, process)
    return Peer(book[number], process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A peer worked alone, another one joined, then the first, rank 0, was killed: what the second said."""

    survivor: Peer
    joined: dict[str, Any]
    saved_before_kill: int
    labels: list[int]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, album: Path) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("peers")
    book = [f"127.0.0.1:{free_port('127.0.0.1:0')}" for _ in range(2)]
    with ExitStack() as stack:
        first = _start(stack, folder, album, book, 0)
        first.until("saved", stage="descriptors", step=2)
        first.signal(signal.SIGSTOP)
        second = _start(stack, folder, album, book, 1)
        assert is_ready(second.address, within_s=120)
        first.signal(signal.SIGCONT)
        joined = second.until("resumed", stage="descriptors")
        saved = first.until("saved", stage="descriptors", generation=joined["generation"])
        first.signal(signal.SIGKILL)
        labels = second.until("labels")["labels"]
        yield Story(survivor=second, joined=joined, saved_before_kill=saved["step"], labels=labels)


def test_a_peer_that_joins_takes_its_share(story: Story) -> None:
    assert story.joined["size"] == 2
    assert story.joined["step"] >= 2


def test_no_stage_is_repeated_after_rank_0_is_killed(story: Story) -> None:
    events = story.survivor.events
    resumed = [event for event in events if event["event"] == "resumed" and event["stage"] == "descriptors"]
    assert resumed[-1]["size"] == 1
    assert resumed[-1]["generation"] > story.joined["generation"]
    assert resumed[-1]["step"] >= story.saved_before_kill - 1  # that save may not have been committed


@pytest.mark.usefixtures("one_rank")
def test_kills_and_joins_do_not_change_the_clusters(story: Story, album: Path, tmp_path: Path) -> None:
    undisturbed = _alone(album, tmp_path)
    assert adjusted_rand_index(undisturbed, story.labels) > 0.98
    assert adjusted_rand_index(read_truth(album), story.labels) > 0.9


def _alone(album: Path, folder: Path) -> list[int]:
    crew = Crew(
        mesh=init_device_mesh("cpu", (1,), mesh_dim_names=(AXIS,)), open_store=lambda stage: open_store(str(folder / stage)),
        is_knocked=lambda: False, report=_ignore,
    )  # fmt: skip
    choices = Choices(**CHOICES)
    return run_pipeline(crew, Album(pictures=pictures_in(album), block=choices.block), choices)


def _ignore(event: str, **details: Any) -> None:
    """Reports of no interest."""
    del event, details
