"""The cases of `debug inject` by name."""

from __future__ import annotations

from collections.abc import Callable

from titan_ckpt.debug.drill import cases, experts
from titan_ckpt.debug.drill.cases import DrillJob

CASES: dict[str, Callable[[DrillJob], None]] = {
    function.__name__: function
    for function in (
        cases.ok, cases.gc_pause, cases.subset_groups, cases.async_not_waited, cases.skip, cases.order,
        cases.op_type, cases.size, cases.dtype, cases.extra_collective, cases.finished_early, cases.wrong_group,
        experts.split_sizes, experts.expert_skipped,
        cases.dataloader, cases.checkpoint_io, cases.python_lock, cases.gil_held, cases.user_code, cases.gc_storm,
        cases.teardown, cases.ring_overflow, cases.chain, cases.sigkill, cases.segfault, cases.sigstop,
        cases.exception, cases.out_of_memory, cases.p2p_missing, cases.p2p_size, cases.p2p_cycle, cases.p2p_batch,
        cases.subset_new_group, cases.straggler,
    )
}  # fmt: skip
CASES["init_hang"] = cases.ok
