"""The cluster examples, as far as checkable without a cluster: shells, torchrun's own parser, our own config."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous
from torch.distributed.run import get_args_parser

from titan_ckpt.cli.main import main
from tools.paths import CONFIGS, EXAMPLES

CONFIG = str(CONFIGS / "llama3_8b.toml")
PRINT_ARGUMENTS = '#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n'
TOOLS = {
    "torchrun": PRINT_ARGUMENTS,
    "srun": PRINT_ARGUMENTS,
    "scontrol": "#!/bin/sh\necho node1\necho node2\n",
}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[1-4]", "SLURM_CPUS_PER_TASK": "64",
    "SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip


@pytest.fixture
def tools(tmp_path: Path) -> dict[str, str]:
    """An environment whose torchrun and srun print how they were called."""
    for name, text in TOOLS.items():
        tool = tmp_path / name
        tool.write_text(text)
        tool.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "AWS", "INTERFACE"))}
    return kept | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def words_of(script: str, environment: dict[str, str], *arguments: str) -> list[str]:
    done = subprocess.run(
        ["bash", str(EXAMPLES / script), *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def containers(file: str) -> Iterator[dict[str, Any]]:
    for document in yaml.safe_load_all((EXAMPLES / file).read_text()):
        spec = document["spec"]
        workers = spec.get("pytorchReplicaSpecs", {}).get("Worker", spec)
        yield from workers.get("template", {}).get("spec", {}).get("containers", [])


def check_torchrun(words: list[str]) -> tuple[Any, list[str]]:
    """The flags as torchrun parses them, and the arguments left for us; torchrun must know every rendezvous setting."""
    given = get_args_parser().parse_args(words)
    assert given.module
    assert given.training_script == "titan_ckpt"
    ours = given.training_script_args
    assert ours[0] == "train"
    check_rendezvous(item.partition("=")[0] for item in given.rdzv_conf.split(",") if item)
    return given, ours[1:]


def check_rendezvous(names: Any) -> None:
    source = inspect.getsource(dynamic_rendezvous) + inspect.getsource(c10d_rendezvous_backend)
    for name in names:
        assert f'"{name.removesuffix("_timeout")}"' in source or f'"{name}"' in source, f"torch knows no {name}"


def check_train(arguments: list[str], capsys: pytest.CaptureFixture[str], *, shutdown_s: int) -> str:
    """The remaining arguments as we parse them; the ranks' grace period must fit into the agent's."""
    assert main(["train", CONFIG, *arguments[1:], "--print-config"]) == 0
    printed = capsys.readouterr().out
    grace_s = re.search(r"grace_s = ([0-9.]+)", printed)
    assert grace_s is not None
    assert float(grace_s.group(1)) < shutdown_s
    return printed


def test_torchrun_example_is_understood_by_torchrun_and_by_us(
    tools: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (CONFIG, "--set", "save.url=s3://bucket/run", "--set", "mesh.dp_shard=-1")
    words = words_of("torchrun.sh", tools | {"HEAD": "node1", "MIN_NODES": "2"}, *arguments)
    given, ours = check_torchrun(words)
    assert (given.nnodes, given.rdzv_endpoint) == ("2:4", "node1:29400")
    assert "s3://bucket/run" in check_train(ours, capsys, shutdown_s=given.shutdown_timeout)


def test_slurm_example_is_understood_by_torchrun_and_by_us(
    tools: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("slurm.sbatch", tools | SLURM, CONFIG, "s3://bucket/run", "--set", "train.steps=7")
    srun, torchrun = words[: words.index("torchrun")], words[words.index("torchrun") + 1 :]
    assert srun == ["--kill-on-bad-exit=0"]
    given, ours = check_torchrun(torchrun)
    assert (given.nnodes, given.nproc_per_node, given.rdzv_id) == ("2:4", "8", "7-2")
    assert given.rdzv_endpoint == "node1:29400"
    printed = check_train(ours, capsys, shutdown_s=given.shutdown_timeout)
    assert "s3://bucket/run" in printed
    assert re.search(r"steps = 7\b", printed)
    text = (EXAMPLES / "slurm.sbatch").read_text()
    notice_s = re.search(r"#SBATCH --signal=B:USR1@(\d+)", text)
    assert notice_s is not None
    assert given.shutdown_timeout < int(notice_s.group(1))


def test_slurm_example_requeues_itself_before_the_time_limit(tools: dict[str, str], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    # A job step that runs until SIGTERM, like torchrun; scancel finds it by its id, like Slurm.
    (tmp_path / "srun").write_text(f"#!/bin/bash\ntrap 'echo committed >> {calls}; exit 0' TERM\necho $$ > {tmp_path}/step\n"
                                   "while :; do sleep 0.05; done\n")  # fmt: skip
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" >> {calls}\nkill -TERM $(cat {tmp_path}/step)\n')
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ntest $1 = show && echo node1 || echo "$@" >> {calls}\n')
    (tmp_path / "scancel").chmod(0o755)
    script = ["bash", str(EXAMPLES / "slurm.sbatch"), CONFIG, "s3://bucket/run"]
    job = subprocess.Popen(script, env=tools | SLURM)
    while not (tmp_path / "step").exists() or not (tmp_path / "step").read_text():
        assert job.poll() is None
    job.send_signal(10)  # SIGUSR1, as --signal=B:USR1 sends it
    assert job.wait(240) == 0
    assert calls.read_text().splitlines() == ["--signal=TERM 7", "committed", "requeue 7"]


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shell_examples_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=True)


def test_kubernetes_job_is_understood_by_torchrun_and_by_us(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes-job.yaml").read_text())
    (container,) = containers("kubernetes-job.yaml")
    assert container["command"] == ["torchrun"]
    given, ours = check_torchrun(container["args"])
    check_train(ours, capsys, shutdown_s=given.shutdown_timeout)
    pod = job["spec"]["template"]
    assert given.shutdown_timeout < pod["spec"]["terminationGracePeriodSeconds"]
    host, _, port = given.rdzv_endpoint.partition(":")
    assert host == f"{job['metadata']['name']}-0.{service['metadata']['name']}"  # pod 0, through the headless service
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert int(given.nnodes.partition(":")[2]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(given.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_pytorchjob_is_understood_by_torchrun_and_by_us(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes-pytorchjob.yaml").read_text())
    (container,) = containers("kubernetes-pytorchjob.yaml")
    assert container["name"] == "pytorch"  # the operator looks for this name
    given, ours = check_torchrun(container["args"])
    check_train(ours, capsys, shutdown_s=given.shutdown_timeout)
    check_rendezvous(item["key"] for item in job["spec"]["elasticPolicy"]["rdzvConf"])
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_skypilot_task_is_understood_by_torchrun_and_by_us(
    tools: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    environment = tools | task["envs"] | nodes | {"SKYPILOT_TASK_ID": "sky-7"}
    done = subprocess.run(
        ["bash", "-e", "-c", task["run"]], env=environment, capture_output=True, text=True, check=True
    )
    given, ours = check_torchrun(done.stdout.splitlines())
    assert (given.nnodes, given.nproc_per_node, given.rdzv_endpoint) == ("2", "8", "10.0.0.1:29400")
    assert "s3://bucket/run" in check_train(ours, capsys, shutdown_s=given.shutdown_timeout)


def test_examples_name_no_rank_by_hand() -> None:
    """Ranks come from the rendezvous: a --node-rank would tie an elastic job to its nodes."""
    for example in (*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.sbatch"), *EXAMPLES.glob("*.yaml")):
        assert "node-rank" not in example.read_text(), example
