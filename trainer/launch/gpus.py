"""GPUs and clusters that `--plan` knows, with the sources of their figures."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU and its share of the links. Rates are per second, of one direction; `flops` is the dense bfloat16 peak.

    Sources: the data sheets of H100 SXM and H200 SXM (989.4 TFLOPS, twice that in Float8; 3.35 and 4.8 TB/s; NVLink 900 GB/s in
    both directions together); `memory_bytes` is what torch reports as total memory. Networks: 400 Gb/s for each GPU.
    """

    name: str
    flops: float = 989.4e12
    memory_bytes: float
    memory_rate: float
    nvlink_rate: float = 450e9
    network_rate: float = 50e9
    per_node: int = 8
    has_full_power: bool = True  # 700 W

    @property
    def usable_bytes(self) -> float:
        """What an estimate may come to: estimates are within 10 % of published peaks."""
        return self.memory_bytes / 1.1


H100 = Gpu(name="H100 SXM 80 GB", memory_bytes=78 * GIB, memory_rate=3.35e12)
H200 = Gpu(name="H200 SXM 141 GB", memory_bytes=139 * GIB, memory_rate=4.8e12)
# The GPUs of torchtitan's tables: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W (benchmarks/llama3_h100_202412_torchtitan.md).
H100_500W = Gpu(name="H100 96 GB, 500 W", memory_bytes=94 * GIB, memory_rate=2.4e12, has_full_power=False)
GPUS = {"h100": H100, "h200": H200, "h100-500w": H100_500W}
