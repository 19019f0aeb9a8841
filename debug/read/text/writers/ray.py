"""Which process of Ray is which rank, and whose error a driver shows.

Sources: Ray's python/ray/train/_internal/backend_executor.py (`Started distributed worker processes`, in older releases and in
Ray Train V2 without a node's id), python/ray/train/torch/config.py (`Setting up process group for`), python/ray/exceptions.py.
"""

from __future__ import annotations

import re

RAY_RANK = re.compile(
    r"\((?:node_id=\w{1,80}, )?ip=(?P<host>[\w.:]{1,80}), pid=(?P<pid>\d{1,9})\) world_rank=(?P<rank>\d{1,6})"
)
RAY_TASK = re.compile(r"RayTaskError\(\w{1,60}\): .{0,300}?\(pid=(?P<pid>\d{1,9}), ip=(?P<host>[\w.:]{1,60})")
RAY_SET_UP = re.compile(r"Setting up process group for: \S{1,80} \[rank=(?P<rank>\d{1,6}), world_size=\d{1,6}\]")
