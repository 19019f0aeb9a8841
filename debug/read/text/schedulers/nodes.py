"""Which of a job's ranks the workers of one launcher are, by what it says of its node.

Forms: torchrun's agent (`Rendezvous complete for workers` in torch/distributed/elastic/agent/server/api.py), commands as
`set -x` prints them, variables of the Kubeflow training operator (`PET_NNODES`, `PET_NPROC_PER_NODE`; `RANK` counts pods there).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from titan_ckpt.debug.read.text.schedulers.shells import first_rank_of

_GLOBAL = re.compile(r"\bglobal_ranks=\[(?P<first>\d{1,6})(?:, ?\d{1,6}){0,4096}\]")
_NODES = re.compile(r"(?:--nnodes[ =](?:\d{1,5}:)?|\bPET_NNODES=\"?|\bgroup_world_size=)(?P<nodes>\d{1,5})\b")
_SETTING = re.compile(r"\b(?P<name>PET_NPROC_PER_NODE|PET_NODE_RANK|RANK)=\"?(?P<value>\d{1,5})\b")
OF_NODES = ("node", "NODE", "RANK=", "global_ranks", "group_world_size")


@dataclass(slots=True)
class Node:
    """`first_rank`: of this node, None if nothing tells. `num_nodes`: of the job, as far as is told. `is_mixed`: one text holds
    what launchers of several nodes say, with nothing before a line that tells them apart."""

    first_rank: int | None = None
    num_nodes: int = 1
    is_mixed: bool = False
    _attempt: int = -1
    _settings: dict[str, int] = field(default_factory=dict)

    def take(self, text: str, attempt: int) -> None:
        """Account for one line of an attempt of the job.

        >>> node = Node()
        >>> for text in ("group_world_size=2", "global_ranks=[2, 3]"):
        ...     node.take(text, 0)
        >>> node.first_rank, node.num_nodes
        (2, 2)
        """
        if match := _GLOBAL.search(text):
            first = int(match["first"])
            self.is_mixed = self.is_mixed or (attempt == self._attempt and first != self.first_rank)
            self.first_rank, self._attempt = first, attempt
        elif self.first_rank is None:
            self.first_rank = first_rank_of(text)
        if match := _NODES.search(text):
            self.num_nodes = max(self.num_nodes, int(match["nodes"]))
        for match in _SETTING.finditer(text) if ("=" in text and "_" in text) or "RANK=" in text else ():
            self._settings.setdefault(match["name"], int(match["value"]))

    @property
    def start(self) -> int | None:
        """The first rank of this node."""
        size = self._settings.get("PET_NPROC_PER_NODE", 0)
        number = self._settings.get("PET_NODE_RANK", self._settings.get("RANK"))
        if self.first_rank is None and size > 1 and number is not None and number < self.num_nodes:
            return number * size
        return self.first_rank
