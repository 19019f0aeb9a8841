"""JSON documents that hold text of logs: torchelastic's error files, entries that cloud services export, and pods.

Formats: torch/distributed/elastic/multiprocessing/errors/error_handler.py (`TORCHELASTIC_ERROR_FILE`: `message.message`,
`message.extraInfo.py_callstack`; `message` is a text where an agent wrote it); `gcloud logging read --format=json` (a list of
LogEntry, newest first); `aws logs get-log-events` and `filter-log-events` (`events`: `timestamp`, `message`, `logStreamName`);
`kubectl get pods -o json` (a Pod or a List of them: `status.containerStatuses`, as in the API's reference); `docker inspect`
(`State.OOMKilled`, `State.ExitCode`, `Config.Env`) and `aws ecs describe-tasks` (`containers[].exitCode`, `reason`);
`kubectl get events -o json` (a List of Events); `aws batch describe-jobs` (`jobs[].status`, `statusReason`,
`attempts[].container`); Kubeflow's jobs (`status.conditions`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from titan_ckpt.debug.read.reports.log_services import service_entries
from titan_ckpt.debug.read.text.lines import TEXT_KEYS, TIME_KEYS

_OF_DATA_SETS = ("text", "line", "event")  # whose lists of objects are no logs
_TEXTS = (*(key for key in TEXT_KEYS if key not in _OF_DATA_SETS), "jsonPayload")


def quoted_lines(value: Any) -> list[str] | None:
    """The lines that a document holds, the oldest first; None if it is none of these."""
    if isinstance(value, dict) and isinstance(value.get("message"), dict | str) and set(value) <= _ERROR_FILE:
        return _error(value["message"])
    for read in (_pods, _cluster_events, _containers, _batch_jobs, _kubeflow):
        if said := read(value):
            return said
    entries = service_entries(value) or (value.get("events") if isinstance(value, dict) else value)
    if isinstance(value, dict) and "level" in value and _is_entry(value):
        entries = [value]  # a log of one line
    if not isinstance(entries, list) or not entries or not all(map(_is_entry, entries)):
        return None
    is_newest_first = _time(entries[0]) > _time(entries[-1])
    return [json.dumps(entry) for entry in sorted(reversed(entries) if is_newest_first else entries, key=_time)]


_ERROR_FILE = {"message", "errorCode"}


def _error(message: Mapping[str, Any] | str) -> list[str] | None:
    if isinstance(message, str):
        return message.splitlines()
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    text = stack if isinstance(stack, str) and stack.strip() else message.get("message")
    if not isinstance(text, str):
        return None
    at = str(extra.get("timestamp", "")) if isinstance(extra, dict) else ""
    when = f"{datetime.fromtimestamp(int(at), UTC):%Y-%m-%dT%H:%M:%SZ} " if _SECONDS.fullmatch(at) else ""
    return [*([f"{when}ERROR the process failed"] if when else ()), *text.splitlines()]


_SECONDS = re.compile(r"1\d{9}")  # whole, since the epoch


def _pods(value: Any) -> list[str] | None:
    """What `kubectl describe pod` says of each pod of the document; None if it holds no pod."""
    is_list = isinstance(value, dict) and value.get("kind") in ("List", "PodList")
    items = value.get("items") if is_list else [value]
    pods = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    named = [pod for pod in pods if pod.get("kind") == "Pod" and isinstance(_inside(pod, "metadata").get("name"), str)]
    return [line for pod in named for line in _described(pod)] if named else None


def _cluster_events(value: Any) -> list[str] | None:
    """The lines of `kubectl get events`, of its JSON; None if the document holds no event."""
    items: Any = value.get("items") if isinstance(value, dict) else None
    found = (
        [one for one in items if isinstance(one, dict) and one.get("kind") == "Event"] if _are_objects(items) else []
    )
    lines = []
    for event in found:
        of, when = _inside(event, "involvedObject"), event.get("lastTimestamp") or event.get("eventTime") or ""
        place = f"{str(of.get('kind')).lower()}/{of.get('name')}"
        lines.append(f"{when} {event.get('type')} {event.get('reason')} {place} {event.get('message')}")
    return lines or None


def _described(pod: Mapping[str, Any]) -> Iterator[str]:
    status = _inside(pod, "status")
    yield f"Name:  {_inside(pod, 'metadata')['name']}"
    ends = [_ended(one) for one in status.get("containerStatuses") or () if isinstance(one, dict)]
    of_pod = {"reason": status["reason"]} if status.get("reason") else {}  # such as Evicted: why its containers ended
    for end in ends if any(ends) else [status]:
        told = {**end, **of_pod}
        yield from (
            f"{name}:  {told[key]}" for name, key in (("Reason", "reason"), ("Exit Code", "exitCode")) if key in told
        )
    for container in _inside(pod, "spec").get("containers") or ():
        limits = _inside(_inside(container, "resources"), "limits")
        yield from (f"{name}:  {count}" for name, count in limits.items() if name.endswith("/gpu"))
        env = [one for one in container.get("env") or () if isinstance(one, dict)]
        env.sort(key=lambda one: one.get("name") == "RANK")  # what the others say of it comes before it
        yield from (f"{one.get('name')}:  {one['value']}" for one in env if one.get("value"))


def _containers(value: Any) -> list[str] | None:
    """What docker or ECS says of containers, in the words of `kubectl describe pod`; None if the document holds none."""
    tasks: Any = value.get("tasks") if isinstance(value, dict) else None
    found = [one for task in tasks for one in task.get("containers") or ()] if _are_objects(tasks) else value
    if not _are_objects(found) or not all(isinstance(one.get("name", one.get("Name")), str) for one in found):
        return None
    lines = [line for one in found for line in _container(one)]
    return lines if any(line.startswith("Exit Code:") for line in lines) else None


def _batch_jobs(value: Any) -> list[str] | None:
    """How AWS Batch says that jobs ended, by the last attempt of each; None if the document holds none."""
    jobs: Any = value.get("jobs", [value] if "attempts" in value else None) if isinstance(value, dict) else None
    if not _are_objects(jobs) or not all(isinstance(job.get("jobName"), str) and "status" in job for job in jobs):
        return None
    lines = []
    for job in jobs:
        attempts: Any = job.get("attempts")
        last = attempts[-1] if _are_objects(attempts) else {}
        reason = job.get("statusReason") or last.get("statusReason") or ""
        lines.append(f"AWS Batch: job {job['jobName']} is {job['status']}: {reason}")
        code = _inside(last, "container").get("exitCode")
        lines += [f"exit code: {code}"] if isinstance(code, int) else []
    return lines


def _kubeflow(value: Any) -> list[str] | None:
    """The conditions of a PyTorchJob, MPIJob or the like, the newest last; None if it is none."""
    conditions: Any = _inside(value, "status").get("conditions")
    if not isinstance(value, dict) or not str(value.get("apiVersion")).startswith("kubeflow.org/"):
        return None
    found = [one.get("message") for one in conditions] if _are_objects(conditions) else []
    return [text for text in found if isinstance(text, str)] or None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _container(one: Mapping[str, Any]) -> Iterator[str]:
    state, name = _inside(one, "State"), str(one.get("name", one.get("Name"))).lstrip("/")
    yield f"Name:  {name}"
    if state.get("OOMKilled") is True or str(one.get("reason")).startswith("OutOfMemory"):
        yield "Reason:  OOMKilled"
    code = state.get("ExitCode", one.get("exitCode"))
    if isinstance(code, int) and state.get("Status") != "running":
        yield f"Exit Code:  {code}"
    env = _inside(one, "Config").get("Env")
    for setting in env if isinstance(env, list) else ():
        key, _, text = str(setting).partition("=")
        yield f"{key}:  {text}"


def _ended(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a container ended, now or before it was started again; {} if it runs."""
    states = (_inside(_inside(status, key), "terminated") for key in ("state", "lastState"))
    return next(filter(None, states), {})


def _inside(value: Any, key: str) -> Mapping[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and any(isinstance(entry.get(key), str | dict) for key in _TEXTS)


def _time(entry: Mapping[str, Any]) -> tuple[float, str]:
    found: Sequence[Any] = [entry[key] for key in TIME_KEYS if key in entry]
    number = found[0] if found and isinstance(found[0], int | float) else 0.0
    return float(number), str(found[0]) if found else ""
