"""What must be set before torch starts, for those who launch ranks without importing torch themselves."""

from __future__ import annotations

RING_ENTRIES = 2000


def environment(entries: int = RING_ENTRIES) -> dict[str, str]:
    """Variables that torch reads once, when the first process group is made: set them before that, in every rank."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(entries),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_TIMING": "1",
    }
