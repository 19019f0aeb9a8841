"""The kubelet's log folders: `/var/log/pods/NAMESPACE_POD_UID/CONTAINER/0.log`, whose number counts the container's restarts, and
`/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log`.

Source: kubernetes/kubernetes, pkg/kubelet/kuberuntime (`BuildPodLogsDirectory`, `buildContainerLogsPath`, `logs/logs.go`; a log
that was rotated has a time behind its name, and `.gz`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_UID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}"
_FOLDER = re.compile(rf"(?P<namespace>[a-z0-9-]{{1,63}})_(?P<pod>[a-z0-9][a-z0-9.-]{{0,252}})_(?:{_UID})")
_LOG = re.compile(
    rf"(?:^|.*/)(?P<folder>{_FOLDER.pattern})/(?P<container>[a-z0-9-]{{1,63}})/(?P<restarts>\d{{1,6}})\.log"
    r"(?:\.\d{8}-\d{6})?(?:\.gz)?$"
)

_LINK = re.compile(
    r"(?:^|.*/)(?P<pod>[a-z0-9][a-z0-9.-]{0,252})_(?P<namespace>[a-z0-9-]{1,63})_(?P<container>[a-z0-9-]{1,63})"
    r"-(?P<folder>[0-9a-f]{64})\.log$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLog:
    """Whose log a path names: `pod` with its namespace, `name` alone, and how often the container had been restarted. `folder`
    differs where the pod, or without that number its container, was made anew."""

    pod: str
    name: str
    folder: str
    container: str
    restarts: int


def pod_log(path: str) -> PodLog | None:
    """What the path of a container's log says; None for other files.

    >>> pod_log("ml_llama-worker-2_0b2d7f1e-1111-4a5b-8c3d-000000000002/pytorch/1.log").restarts
    1
    """
    match = _LOG.match(path) or _LINK.match(path)
    if match is None:
        return None
    return PodLog(
        pod=f"{match['namespace']}_{match['pod']}", name=match["pod"], folder=match["folder"],
        container=match["container"], restarts=int(match.groupdict().get("restarts") or 0),
    )  # fmt: skip


def are_pods(names: Iterable[str]) -> bool:
    """Whether all of these folders are pods'."""
    return all(_FOLDER.fullmatch(name) for name in names)


def newest_starts(times: Mapping[str, float]) -> set[str]:
    """The paths that belong to the newest start of each container, and all that are no pod's. `times`: when each was written.

    A pod that was made anew under the same name has another folder; the one written last counts.
    """
    logs = {path: log for path in times if (log := pod_log(path)) is not None}
    newest: dict[tuple[str, str], tuple[float, str]] = {}
    for path, log in logs.items():
        key = log.pod, log.container
        newest[key] = max(newest.get(key, (0.0, "")), (times[path], log.folder))
    restarts: dict[tuple[str, str], int] = {}
    for log in logs.values():
        if log.folder == newest[log.pod, log.container][1]:
            key = log.folder, log.container
            restarts[key] = max(restarts.get(key, 0), log.restarts)
    old = {path for path, log in logs.items() if restarts.get((log.folder, log.container)) != log.restarts}
    return set(times) - old
