"""How cluster managers, launchers and cloud services tell of ends. The texts are in the forms of the sources that
`debug/read/text` and `debug/read/reports/documents.py` name; none is copied."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import EventKind, VerdictKind
from titan_ckpt.debug.read.logs import JobLogs, combine
from titan_ckpt.debug.read.text.job_text import JobText, read_text
from titan_ckpt.errors import NotFoundError


def read(text: str) -> JobLogs:
    return combine([read_text(JobText(source="job.log", scope="job.log", year=2026), [(text.encode(), False)])])


RANKS = {
    "Open MPI": ("MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 7.\n", {3: 1}),
    "MPICH": (
        "Abort(7) on node 3 (rank 3 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7) - process 3\n",
        {3: 7},
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_launcher_that_names_a_rank_gives_its_exit(name: str) -> None:
    text, codes = RANKS[name]
    assert {ended.rank: ended.code for ended in read(text).exits} == codes


LAUNCH = "[2026-11-22 02:07:09,123] [{level}] [launch.py:{line}] {text}"
COMMAND = "['/usr/bin/python3', '-u', 'train.py', '--local_rank={rank}', '--deepspeed', 'ds.json']"
SPAWNED = [
    LAUNCH.format(
        level="INFO", line="256:main", text=f"process {3000 + rank} spawned with command: {COMMAND.format(rank=rank)}"
    )
    for rank in range(4)
]
ENDED = LAUNCH.format(
    level="ERROR", line="325:sigkill_handler", text=COMMAND.format(rank=3) + " exits with return code = -9"
)


def test_deepspeed_names_the_last_rank_whoever_ended() -> None:
    logs = read("\n".join([*SPAWNED, ENDED]))
    assert not logs.exits
    assert logs.job is not None
    assert [(event.kind, event.values) for event in logs.job.events] == [(EventKind.KILLED, {"signal": "SIGKILL"})]


def test_process_that_deepspeed_started_is_a_rank() -> None:
    logs = read(
        "\n".join([*SPAWNED, ENDED, "[881212.10] Out of memory: Killed process 3001 (python) total-vm:9kB", ""])
    )
    assert [event.kind for log in logs.ranks[1] for event in log.events] == [EventKind.KILLED]


NOTES = {
    "LSF memory": ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", EventKind.KILLED, {"cause": "oom"}),
    "LSF time": ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", EventKind.TIME_LIMIT, {}),
    "LSF owner": ("TERM_OWNER: job killed by owner.", EventKind.CANCELLED, {}),
    "PBS time": ("=>> PBS: job killed: walltime 3610 exceeded limit 3600", EventKind.TIME_LIMIT, {}),
    "PBS memory": ("=>> PBS: job killed: mem 2097160kb exceeded limit 2097152kb", EventKind.KILLED, {"cause": "oom"}),
    "TORQUE node": (
        "=>> PBS: job killed: node 3 (node17) requested job terminate, 'EOF' (code 1099) - received SISTER_EOF",
        EventKind.NODE_LOST, {"host": "node17"},
    ),
    "sacct": (
        "JobID           JobName  Partition      State ExitCode \n------------ ---------- ---------- ---------- -------- \n"
        "4711           pretrain        gpu OUT_OF_ME+    0:125 ", EventKind.KILLED, {"cause": "oom"},
    ),
    "sacct -p": ("JobID|JobName|State|ExitCode|\n4711|pretrain|NODE_FAIL|1:0|", EventKind.NODE_LOST, {}),
    "scontrol": ("   JobState=TIMEOUT Reason=TimeLimit Dependency=(null)", EventKind.TIME_LIMIT, {}),
    "kubectl describe": (
        "Name:             job-worker-3\nNode:             node17/10.0.0.17\n    State:          Terminated\n"
        "      Reason:       OOMKilled\n      Exit Code:    137", EventKind.KILLED, {"host": "job-worker-3", "cause": "oom"},
    ),
    "kubectl get events": (
        "2m3s   Warning   NodeNotReady   pod/job-worker-3   Node is not ready", EventKind.NODE_LOST, {"host": "job-worker-3"},
    ),
    "kubectl, evicted": (
        "9s    Warning   Evicted   pod/job-worker-2   The node was low on resource: memory.", EventKind.KILLED,
        {"host": "job-worker-2", "cause": "evicted"},
    ),
    "Vertex AI": (
        "The replica workerpool1-2 exited with a non-zero status of 137.", EventKind.KILLED,
        {"host": "workerpool1-2", "signal": "SIGKILL"},
    ),
    "SageMaker": ("AlgorithmError: ExecuteUserScriptError:\nExitCode 1", EventKind.EXITED, {}),
    "SkyPilot": ("ERROR: Job 1 failed with return code list: [0, 137]", EventKind.KILLED, {"host": "node 1"}),
    "Ray, memory": (
        "Memory on the node (IP: 10.0.0.4, ID: ab) where the task (actor ID: c, name=W.run, pid=4711) was running "
        "was 30.2GB / 31GB", EventKind.KILLED, {"pid": "4711", "cause": "oom"},
    ),
    "Ray, died": (
        "(raylet, ip=10.0.0.4) A worker died or was killed while executing a task by an unexpected system error. "
        "Worker PID: 4711 Worker exit type: SYSTEM_ERROR", EventKind.EXITED, {"pid": "4711", "host": "10.0.0.4", "is_lost": "1"},
    ),
    "journalctl -o export": (
        "__CURSOR=s=1\n__REALTIME_TIMESTAMP=1795312028123456\n_HOSTNAME=node17\n"
        "MESSAGE=NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n", EventKind.DEVICE_ERROR, {"xid": "79"},
    ),
    "journalctl -o json": (
        '{"__REALTIME_TIMESTAMP":"1795312028123456","_HOSTNAME":"n17","MESSAGE":"Out of memory: Killed process 4711 (python)"}',
        EventKind.KILLED, {"pid": "4711", "cause": "oom"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_reported_end_is_a_fact_of_the_job(name: str) -> None:
    text, kind, values = NOTES[name]
    job = read(text + "\n").job
    assert job is not None
    [event] = [event for event in job.events if event.kind != EventKind.OOM]
    assert event.kind == kind
    assert values.items() <= event.values.items()


@pytest.mark.parametrize("name", [name for name in NOTES if name not in ("journalctl -o export", "journalctl -o json")])
def test_undecided_report_says_what_was_reported(name: str, tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").write_text("2026-11-22 02:00:00 step 1\n")
    (tmp_path / "rank_1.log").write_text("2026-11-22 02:00:00 step 1\n")
    (tmp_path / "job.out").write_text(NOTES[name][0] + "\n")
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.INSUFFICIENT_DATA, ())
    assert any("job.out" in item.source for item in top.evidence)


LINES = {
    "SageMaker with MPI": ("[1,mpirank:3,algo-2]<stderr>:{}", 3, "algo-2"),
    "Determined": ("[2026-11-27T10:00:00.000000Z] 1234abcd || [rank=3] {}", 3, ""),
    "logcli": ('2026-11-27T10:00:00Z {{app="fit", pod="job-worker-3"}} {}', 3, ""),
    "NVRx": ("[WARNING] [RankMonitorServer:3] {}", 3, ""),
    "SageMaker's colours": ("[rank3]: #033[34m{}#033[0m", 3, ""),
}
TRACEBACK = ["Traceback (most recent call last):", '  File "/job/a.py", line 3, in f', "KeyError: 1"]


@pytest.mark.parametrize("name", LINES)
def test_prefix_of_a_cloud_service_gives_the_rank(name: str) -> None:
    form, rank, host = LINES[name]
    logs = read("\n".join(map(form.format, TRACEBACK)) + "\n")
    [event] = [event for log in logs.ranks[rank] for event in log.events]
    assert event.frame is not None
    assert (event.kind, event.frame.place, logs.hosts.get(rank, "")) == (EventKind.EXCEPTION, "/job/a.py:3", host)


def test_the_replica_of_a_pool_alone_is_no_rank() -> None:
    """Vertex AI counts them in each pool, and says nothing of their processes."""
    form = "ERROR\t2026-11-22 02:07:08.123456 +0000\tworkerpool1-3\t\t{}"
    logs = read("\n".join(map(form.format, TRACEBACK)) + "\n")
    assert not logs.ranks
    assert logs.job is not None
    assert [event.kind for event in logs.job.events] == [EventKind.EXCEPTION]


ENTRIES = {
    "Cloud Logging": {"jsonPayload": {"message": "TEXT"}, "resource": {"labels": {"pod_name": "job-worker-3"}}},
    "fluent-bit": {"log": "TEXT", "kubernetes": {"pod_name": "job-worker-3", "host": "node17"}},
    "CloudWatch Logs": {"message": "TEXT", "logStreamName": "team/algo-3", "ingestionTime": 1795312029000},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_a_log_service_are_opened(name: str, tmp_path: Path) -> None:
    entries = [
        {
            **json.loads(json.dumps(ENTRIES[name]).replace("TEXT", json.dumps(line)[1:-1])),
            "timestamp": 1795312028000 + number,
        }
        for number, line in enumerate(TRACEBACK)
    ]
    document = {"events": entries} if name == "CloudWatch Logs" else entries
    (tmp_path / "export.json").write_text(
        json.dumps(list(reversed(entries)) if isinstance(document, list) else document)
    )
    [event] = open_run(str(tmp_path)).ranks[3].events
    assert event.frame is not None
    assert event.frame.place == "/job/a.py:3"


def answers(lines: Sequence[tuple[int, str, str]]) -> dict[str, object]:
    """What services answer to a query for lines (seconds, pod, text): the newest first where that is their order."""
    newest = list(reversed(lines))
    at = "2026-11-28T10:00:{:02}.000Z"
    pods = {
        pod: [[f"{1795860000 + s}000000000", text] for s, name, text in newest if name == pod] for _, pod, _ in lines
    }
    streams = [{"stream": {"pod": pod, "app": "fit"}, "values": values} for pod, values in pods.items()]
    ecs = [{"@timestamp": at.format(s), "kubernetes": {"pod": {"name": pod}}, "message": t} for s, pod, t in newest]
    flat = [{"@timestamp": [at.format(s)], "kubernetes.pod.name": [p], "message": [t]} for s, p, t in newest]
    cells = [{"@timestamp": at.format(s), "@logStream": pod, "@message": text} for s, pod, text in lines]
    return {
        "loki": {"status": "success", "data": {"resultType": "streams", "result": streams}},
        "loki push": {"streams": [{**one, "values": [[*v, {}] for v in one["values"]]} for one in streams]},
        "elasticsearch": {"took": 3, "hits": {"total": {"value": 9}, "hits": [{"_index": "x", "_source": e} for e in ecs]}},
        "opensearch fields": {"hits": {"hits": [{"fields": entry} for entry in flat]}},
        "splunk": {"results": [{"_time": at.format(s), "host": pod, "_raw": text} for s, pod, text in newest]},
        "insights": {"results": [[{"field": k, "value": v} for k, v in cell.items()] for cell in cells]},
        "datadog": {"data": [{"attributes": {"timestamp": at.format(s), "host": p, "message": t}} for s, p, t in newest]},
        "azure": {"tables": [{"columns": [{"name": n} for n in ("TimeGenerated", "PodName", "LogMessage")],
                              "rows": [[at.format(s), pod, text] for s, pod, text in newest]}]},
        "docker in loki": {
            "streams": [{**one, "values": [[t, json.dumps({"log": x})] for t, x in one["values"]]} for one in streams]
        },
    }  # fmt: skip


LINES_OF_PODS = [
    *((step, f"fit-worker-{pod}", f"rank {pod} step {step}") for step in range(5) for pod in range(4)),
    *((6 + number, "fit-worker-3", line) for number, line in enumerate(TRACEBACK)),
]


@pytest.mark.parametrize("service", answers(LINES_OF_PODS))
@pytest.mark.parametrize("name", ["query.json", "log.txt"])
def test_answers_of_log_services_are_logs(service: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(answers(LINES_OF_PODS)[service]))
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits, top.file, top.line) == (VerdictKind.RANK_DIED, (3,), "/job/a.py", 3)


@pytest.mark.parametrize(
    "told",
    [
        {"data": 1},
        {"data": {"result": [1]}},
        {"hits": {"hits": [[]]}},
        {"results": [[1]]},
        [{"text": "\n".join(TRACEBACK)}] * 2,
    ],
)
def test_an_answer_without_lines_is_no_log(told: object, tmp_path: Path) -> None:
    (tmp_path / "query.json").write_text(json.dumps(told))
    with pytest.raises(NotFoundError, match="no dump, stack, black box or log"):
        open_run(str(tmp_path))


@pytest.mark.parametrize("opened", ["", "none_ab12/attempt_0"])
def test_error_file_of_torchelastic_is_that_ranks_error(tmp_path: Path, opened: str) -> None:
    folder = tmp_path / "none_ab12" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    extra = {"py_callstack": "\n".join(TRACEBACK), "timestamp": "1795312028"}
    (folder / "error.json").write_text(json.dumps({"message": {"message": "KeyError: 1", "extraInfo": extra}}))
    (tmp_path / "none_ab12" / "attempt_0" / "0").mkdir()
    (tmp_path / "none_ab12" / "attempt_0" / "0" / "stderr.log").write_text("step 1\n")
    run = open_run(str(tmp_path / opened))
    top = diagnose(run)[0]
    assert (top.verdict, top.culprits, top.file, top.line) == (VerdictKind.RANK_DIED, (1,), "/job/a.py", 3)
    assert sorted(run.ranks) == [0, 1]


def test_traceback_that_spawn_repeats_is_of_the_process() -> None:
    outer = [
        TRACEBACK[0],
        '  File "train.py", line 9, in <module>',
        "torch.multiprocessing.spawn.ProcessRaisedException: ",
        "",
    ]
    logs = read("\n".join([*outer, "-- Process 2 terminated with the following error:", *TRACEBACK, ""]))
    assert [event.text for log in logs.ranks[2] for event in log.events] == ["KeyError: 1"]
    assert logs.job is None or not logs.job.events


def test_line_that_begins_with_underscores_is_no_journal() -> None:
    logs = read("[rank1]: x\n__main__ started\n[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 1\n")
    assert [event.kind for log in logs.ranks[1] for event in log.events] == [EventKind.EXCEPTION]


SACCT = {
    "sacct, state and code alone": "JobID|State|ExitCode\n113|{0}|0:0\n113.batch|CANCELLED|0:15\n",
    "sacct, aligned": "JobID             State ExitCode \n------------ ---------- -------- \n113          {0:>10}      0:0 \n",
    "sacct, no number of the job": "     State ExitCode \n---------- -------- \n{0:>10}      0:0 \n",
    "sacct, all columns": "JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode\n113|train|gpu|acct|64|{0}|0:0\n",
    "scontrol": "JobId=113 JobName=train\n   JobState={0} Reason=TimeLimit Dependency=(null)\n",
    "scontrol, the field alone": "JobState={0}\n",
    "squeue": "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)\n"
    "               113       gpu    train    alice {1}   24:00:10      4 node[1-4]\n",
    "squeue, long": "JOBID PARTITION NAME USER STATE TIME TIME_LIMI NODES NODELIST(REASON)\n113 gpu t al {0} 1:00 1:00 1 n1\n",
}  # fmt: skip


@pytest.mark.parametrize("name", SACCT)
@pytest.mark.parametrize(
    ("state", "short", "kind"),
    [
        ("TIMEOUT", "TO", EventKind.TIME_LIMIT),
        ("OUT_OF_ME+", "OOM", EventKind.KILLED),
        ("NODE_FAIL", "NF", EventKind.NODE_LOST),
        ("CANCELLED", "CA", EventKind.CANCELLED),
    ],
)
def test_state_of_a_job_in_any_columns(name: str, state: str, short: str, kind: EventKind, tmp_path: Path) -> None:
    text = SACCT[name].format(state, short)
    job = read(text).job
    assert job is not None
    assert job.events[0].kind == kind
    (tmp_path / "console.log").write_text(
        "".join(f"[rank{rank}]: step {step}\n" for step in range(2) for rank in range(4))
    )
    (tmp_path / "sacct.txt").write_text(text)
    top = diagnose(open_run(str(tmp_path)))[0]
    assert (top.verdict, top.culprits) == (VerdictKind.INSUFFICIENT_DATA, ())


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED", "PENDING"])
def test_job_that_goes_on_is_no_fault(state: str) -> None:
    job = read(f"JobID|JobName|State|ExitCode\n113|F|{state}|0:0\nTO be continued\n113 F\n").job
    assert job is not None
    assert not job.events
