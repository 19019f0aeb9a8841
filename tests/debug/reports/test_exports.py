"""Logs as services and browsers save them, and what container engines say of their containers."""

from __future__ import annotations

import csv
import html
import io
import json
from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import OWN, PEER, first_verdict
from titan_ckpt.debug import open_run
from titan_ckpt.errors import NotFoundError

SPLUNK = ("_time", "host", "source", "_raw")
DATADOG = ("Date", "Host", "Message")


def table(columns: tuple[str, ...], *, newest_first: bool) -> str:
    """An export of three pods' logs, of which the second died."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    rows: list[dict[str, str]] = []
    for rank in (1, 0, 2):
        for line in (OWN if rank == 1 else PEER).splitlines():
            time = f"2026-11-25T10:00:{len(rows):02d}Z"
            rows.append({"_time": time, "Date": time, "host": f"job-worker-{rank}", "Host": f"job-worker-{rank}", "_raw": line,
                         "Message": line, "source": f"/log/rank{rank}.log"})  # fmt: skip
    for row in reversed(rows) if newest_first else rows:
        writer.writerow([row[name] for name in columns])
    return out.getvalue()


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("columns", [SPLUNK, DATADOG])
def test_a_table_of_messages_is_a_log(tmp_path: Path, columns: tuple[str, ...], newest_first: bool) -> None:
    (tmp_path / "export.csv").write_text(table(columns, newest_first=newest_first))
    assert first_verdict(tmp_path).culprits == (1,)


def test_a_message_of_several_lines_is_one_entry(tmp_path: Path) -> None:
    rows = [
        ["@timestamp", "@message", "@logStream"],
        *([f"2026-11-25 10:00:0{r}", OWN if r == 1 else PEER, f"job-{r}"] for r in (0, 1, 2)),
    ]
    out = io.StringIO()
    csv.writer(out).writerows(rows)
    (tmp_path / "insights.csv").write_text("\ufeff" + out.getvalue())
    assert first_verdict(tmp_path).culprits == (1,)


def test_a_table_of_figures_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,2.5\n")
    with pytest.raises(NotFoundError):
        open_run(tmp_path)


def test_a_saved_page_of_a_log_is_read(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: {line}" for rank in (0, 1, 2) for line in (OWN if rank == 1 else PEER).splitlines()]
    page = (
        "<html><head><title>log</title></head><body><pre>"
        + "<br/>\n".join(map(html.escape, lines))
        + "</pre></body></html>"
    )
    (tmp_path / "console.html").write_text(page)
    assert first_verdict(tmp_path).culprits == (1,)


def inspected(rank: int, *, oom: bool) -> dict[str, object]:
    state = {"Status": "exited" if oom else "running", "OOMKilled": oom, "ExitCode": 137 if oom else 0}
    return {"Name": f"/train-{rank}", "State": state, "Config": {"Env": [f"RANK={rank}", "WORLD_SIZE=3"]}}


def test_docker_names_the_container_that_ran_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "inspect.json").write_text(json.dumps([inspected(rank, oom=rank == 2) for rank in range(3)]))
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}.log").write_text(PEER)
    top = first_verdict(tmp_path)
    assert (top.culprits, top.subtype) == ((2,), "oom")


@pytest.mark.parametrize(
    "text",
    [
        'ab12cd34ef57   train:1   "python train.py"   2 hours ago   Exited (137) 3 minutes ago             train-worker-2\n',
        "train-worker-2 exited with code 137\n",
    ],
)
def test_what_docker_says_of_an_end_is_a_fact(tmp_path: Path, text: str) -> None:
    (tmp_path / "containers.txt").write_text(text)
    assert any("137" in item.text for item in first_verdict(tmp_path).evidence)


def pod(rank: int, code: int, **env: str) -> dict[str, object]:
    ended = {"exitCode": code, "reason": "Error"}
    values = [{"name": name, "value": value} for name, value in {"RANK": str(rank), **env}.items()]
    return {
        "kind": "Pod",
        "metadata": {"name": f"mnist-worker-{rank}"},
        "spec": {"containers": [{"name": "pytorch", "env": values}]},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "pytorch", "state": {"terminated": ended}}]},
    }


@pytest.mark.parametrize("is_compact", [True, False])
@pytest.mark.parametrize(
    ("codes", "env", "culprits"),
    [
        ((143, 139, 143), {}, (1,)),
        ((143, 137, 143), {}, ()),  # the kubelet ends pods so
        ((1, 1, 1), {}, ()),
        ((143, 139, 143), {"PET_NPROC_PER_NODE": "8"}, ()),  # then `RANK` counts pods
    ],
)
def test_a_signal_of_a_pod_is_its_ranks(
    codes: tuple[int, ...], env: dict[str, str], culprits: tuple[int, ...], *, is_compact: bool, tmp_path: Path
) -> None:
    pods = [pod(rank, code, **env) for rank, code in enumerate(codes)]
    items = ",\n".join(map(json.dumps, pods))
    text = (
        f'{{"kind":"List","items":[\n{items}]}}'
        if is_compact
        else json.dumps({"kind": "List", "items": pods}, indent=4)
    )
    (tmp_path / "pods.json").write_text(text)
    assert first_verdict(tmp_path).culprits == culprits
