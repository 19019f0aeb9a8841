"""A worker's number on its node is no rank of the job: the agent, the labels of the others or a table say which rank it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run

# torchrun's own lines (torch/distributed/elastic/agent/server/api.py, .../multiprocessing/api.py).
AGENT = (
    "INFO:torch.distributed.elastic.agent.server.api:[default] Rendezvous complete for workers. Result:\n"
    "  restart_count=0\n  group_rank={group}\n  group_world_size=2\n  local_ranks=[0, 1]\n  role_ranks={ranks}\n"
    "  global_ranks={ranks}\n  global_world_sizes=[4, 4]\n"
)
FAILED = "torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: {} (pid: 41) of binary: py\n"
SPAWNED = "torch.multiprocessing.spawn.ProcessExitedException: process {} terminated with signal SIGKILL\n"


def lines(ranks: range, form: str) -> str:
    return "".join(form.format(rank, step) for step in range(4) for rank in ranks)


def culprits(text: str, folder: Path) -> tuple[int, ...]:
    (folder / "log.txt").write_text(text)
    return diagnose(open_run(str(folder)))[0].culprits


@pytest.mark.parametrize(("group", "ranks", "rank"), [(0, "[0, 1]", 1), (1, "[2, 3]", 3)])
def test_the_agent_names_the_ranks_of_its_node(group: int, ranks: str, rank: int, tmp_path: Path) -> None:
    agent = AGENT.format(group=group, ranks=ranks)
    assert culprits(agent + lines(range(2), "[default{}]:step {}\n") + FAILED.format(1), tmp_path) == (rank,)


def test_a_number_on_one_of_two_labelled_nodes_is_no_rank(tmp_path: Path) -> None:
    steps = "".join(f"{node}: epoch 0 it {step}\n" for step in range(4) for node in (0, 1))
    assert culprits(steps + "1: E0701 12:01:33.120000 870 " + FAILED.format(2), tmp_path) == ()


def test_a_number_in_the_log_of_one_of_two_pods_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "gpt-worker-0.log").write_text("step 1\nstep 2\n")
    (tmp_path / "gpt-worker-1.log").write_text("step 1\nstep 2\nE0701 12:01:33.120000 870 " + FAILED.format(3))
    assert diagnose(open_run(str(tmp_path)))[0].culprits == ()


def test_agents_of_two_nodes_in_one_text_are_not_told_apart(tmp_path: Path) -> None:
    agents = AGENT.format(group=0, ranks="[0, 1]") + AGENT.format(group=1, ranks="[2, 3]")
    assert culprits(agents + "step 1\nstep 2\n" + FAILED.format(1), tmp_path) == ()


@pytest.mark.parametrize("end", [FAILED, SPAWNED])
@pytest.mark.parametrize(
    "form", ["[rank{}]: step {}\n", "INFO rank {}: step {}\n", "(rank {}) step {}\n", "rank {} | step {}\n"]
)
def test_labels_of_other_ranks_deny_that_it_is_the_first_node(end: str, form: str, tmp_path: Path) -> None:
    assert culprits(lines(range(4, 8), form) + end.format(2), tmp_path) == ()
    assert culprits(lines(range(4), form) + end.format(2), tmp_path) == (2,)


def test_each_task_of_a_step_is_a_node_of_its_own(tmp_path: Path) -> None:
    text = lines(range(2), "0: [rank{}]: step {}\n") + lines(range(2, 4), "1: [rank{}]: step {}\n")
    assert culprits(f"{text}1: {FAILED.format(1)}", tmp_path) == ()
    assert culprits(f"{text}0: {FAILED.format(1)}", tmp_path) == (1,)


def test_a_pod_counts_nodes_in_its_variable_rank(tmp_path: Path) -> None:
    settings = "PET_NNODES=2\nPET_NPROC_PER_NODE=4\nRANK={}\nWORLD_SIZE=2\nstep 1\nstep 2\n"
    assert culprits(settings.format(1) + FAILED.format(2), tmp_path) == (6,)
    assert culprits(settings.format(0) + FAILED.format(2), tmp_path) == (2,)


def test_a_node_of_several_of_which_nothing_tells_the_place(tmp_path: Path) -> None:
    command = "+ torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d train.py\nstep 1\nstep 2\n"
    assert culprits(command + FAILED.format(2), tmp_path) == ()
    one = command.replace("--nnodes=2", "--nnodes=1")
    assert culprits(one + FAILED.format(2), tmp_path) == (2,)
