"""What `kubectl describe pod` says of a container that was ended: its reason, and the rank in its environment."""

from __future__ import annotations

import re
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM

_FIELD = re.compile(
    r"\s*(?P<key>Name|Reason|Exit Code|RANK|[a-z.]{3,40}/gpu|PET_NPROC_PER_NODE):\s{2,}(?P<value>\S{1,200})\s*$"
)
_BY_THE_KUBELET = (128 + SIGTERM, 128 + SIGKILL)  # at a pod's deletion, the second after its grace period
_CAUSES = {"OOMKilled": "oom", "Evicted": "evicted"}


@dataclass(slots=True)
class PodDescription:
    """The description that is being read, field by field: a new `Name` begins the next pod."""

    name: str = ""
    cause: str = ""
    reason: str = ""
    code: int = 0  # of its end by a signal that no kubelet sends
    has_several: bool = (
        False  # ranks: `RANK` counts pods then (Kubeflow's training operator, pkg/controller.v1/pytorch)
    )

    @property
    def text(self) -> str:
        """The finding in words."""
        return f"{self.name}: {self.reason}"

    def named(self, text: str) -> str:
        """A line of the description, with the pod that it describes."""
        return f"{self.name}: {text.strip()}" if self.name and self.name not in text else text

    def has_failed(self, text: str) -> bool:
        """Whether this line is an exit code other than 0, of an end without a reason that says more."""
        match = _FIELD.match(text)
        return match is not None and match["key"] == "Exit Code" and match["value"] != "0" and not self.cause

    def take(self, text: str) -> int | None:
        """Account for one line; the rank that was ended, where this line completes what is to be known of it."""
        match = _FIELD.match(text)
        if match is None:
            return None
        key, value = match["key"], match["value"]
        if key == "Name":
            self.name, self.cause, self.reason, self.code, self.has_several = value, "", "", 0, False
        elif key == "Reason" and value in _CAUSES:
            self.cause, self.reason = _CAUSES[value], value
        elif key == "Exit Code" and value.isdigit() and 128 < int(value) < 160 and int(value) not in _BY_THE_KUBELET:
            self.code = int(value)
        elif key.endswith("/gpu") or key == "PET_NPROC_PER_NODE":
            self.has_several = self.has_several or value != "1"
        elif key == "RANK" and not self.has_several and self.name and (self.cause or self.code) and value.isdigit():
            return int(value[:7])
        return None
