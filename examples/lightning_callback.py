"""Lightning with titan-ckpt checkpoints. Kill it and start it again: it goes on bit for bit.

pip install lightning 'titan-ckpt[torch]'
python examples/lightning_callback.py runs/lightning 20
"""

import sys

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from titan_ckpt.integrations.lightning import TitanCheckpoint

url, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = BoringModel()
trainer = lightning.Trainer(
    max_steps=steps, callbacks=[TitanCheckpoint(url, every_n_train_steps=5)], logger=False, accelerator="cpu"
)
trainer.fit(model)
print(f"step {trainer.global_step} weights {model.layer.weight.sum().item()!r}")  # noqa: T201
