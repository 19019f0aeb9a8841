"""How often to save: what a save costs against what a failure loses."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


def best_interval_s(stall_s: float, mean_time_between_failures_s: float) -> float:
    """The save interval in seconds that loses the least work: Daly's higher-order form of Young's sqrt(2 delta M).

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22 (2006), eq. 37.

    >>> round(best_interval_s(5.0, 86400.0))
    926
    """
    delta, mean = stall_s, mean_time_between_failures_s
    if delta >= 2 * mean:
        return mean
    ratio = delta / (2 * mean)
    return sqrt(2 * delta * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - delta


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """How often to save: the cost of a save, the time between failures, and the interval that loses the least work."""

    stall_s: float
    upload_s: float
    failure_every_s: float
    save_every_s: float


def save_schedule(
    bytes_per_rank: float,
    num_ranks: int,
    *,
    rank_mtbf_h: float,
    bandwidth: float,
    stage_bandwidth: float = 10e9,
) -> SaveSchedule:
    """The schedule for ranks that fail every `rank_mtbf_h` hours; bandwidths of upload and of device to host in bytes/s."""
    stall_s = bytes_per_rank / stage_bandwidth
    upload_s = bytes_per_rank / bandwidth
    mtbf_s = rank_mtbf_h * 3600 / num_ranks
    interval_s = max(best_interval_s(stall_s, mtbf_s), upload_s)
    return SaveSchedule(stall_s=stall_s, upload_s=upload_s, failure_every_s=mtbf_s, save_every_s=interval_s)
