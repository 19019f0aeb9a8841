"""Compression ratio and speed of `planes-zstd` on a trained model's state, beside DCP's ZStandard extension.

python -m benchmarks.checkpoints.core_codec [--steps 30]
"""

from __future__ import annotations

import argparse
import io
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint._extension import ZStandard

from titan_ckpt.format.codec import encode
from titan_ckpt.state.state_dict import as_bytes
from tools.report import Measurement, timed, write_section


def trained_state(steps: int) -> dict[str, list[torch.Tensor]]:
    """Weights and Adam moments of a small network after some training steps on structured data, 60 MB each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1100, 1100) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    projection = torch.randn(1100, 1100) / 33
    for _ in range(steps):
        x = torch.randn(64, 1100)
        loss = (model(x) - torch.tanh(x @ projection)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [p.detach() for p in model.parameters()]
    state: list[dict[str, Any]] = [optimizer.state[p] for p in model.parameters()]
    return {
        "fp32 weights": weights,
        "fp32 first moments": [s["exp_avg"] for s in state],
        "fp32 second moments": [s["exp_avg_sq"] for s in state],
        "bf16 weights": [w.to(torch.bfloat16) for w in weights],
    }


def dcp_zstd(tensors: list[torch.Tensor]) -> int:
    """Compressed size in bytes with DCP's own extension."""
    out = io.BytesIO()
    writer = ZStandard().transform_to(out)
    for tensor in tensors:
        writer.write(bytes(as_bytes(tensor)))
    writer.flush()
    return len(out.getvalue())


def _encode_all(tensors: list[torch.Tensor], sizes: list[int]) -> None:
    sizes.extend(len(part) for tensor in tensors for part in encode(as_bytes(tensor), tensor.element_size()))


def _dcp_zstd_all(tensors: list[torch.Tensor], sizes: list[int]) -> None:
    sizes.append(dcp_zstd(tensors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    bars = []
    for name, tensors in trained_state(parser.parse_args().steps).items():
        raw = sum(len(as_bytes(tensor)) for tensor in tensors)
        sizes: list[int] = []
        seconds = timed(partial(_encode_all, tensors, sizes))
        theirs: list[int] = []
        peer_s = timed(partial(_dcp_zstd_all, tensors, theirs))
        ratio = raw / sum(sizes)
        bars.append(
            Measurement(
                what=name,
                figure=f"{ratio:.2f} x smaller at {raw / seconds / 1e9:.2f} GB/s",
                bar="smaller than DCP's extension",
                holds=sum(sizes) <= theirs[0],
                peer=f"DCP ZStandard {raw / theirs[0]:.2f} x at {raw / peer_s / 1e9:.2f} GB/s, no ranged reads",
            )
        )
    write_section("core-codec", "The codec planes-zstd, one thread", bars)


if __name__ == "__main__":
    main()
