"""Lightning with titan-ckpt: a callback that saves in the background and resumes from the newest complete checkpoint.

pip install lightning 'titan-ckpt[torch]'
python examples/lightning_callback.py runs/lightning 20
"""

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import titan_ckpt

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class TitanCheckpoint(lightning.Callback):  # type: ignore[misc]  # lightning is not installed where this is checked
    """Weights and optimizers go to `url` every `every` steps; Lightning's own counters restart at 0."""

    def __init__(self, url: str, every: int) -> None:
        self.url, self.every, self.first_step = url, every, 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if any(info.is_resumable for info in titan_ckpt.list_checkpoints(self.url)):
            checkpoint = titan_ckpt.open_checkpoint(self.url)
            state = self._state(trainer, pl_module)
            titan_ckpt.load(checkpoint, state)
            set_state_dict(
                pl_module, trainer.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                options=FLAT,
            )  # fmt: skip
            self.first_step = checkpoint.step
        self.saver = titan_ckpt.Saver(self.url)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, *_: Any) -> None:
        self.saver.check()
        if trainer.global_step % self.every == 0:
            self.saver.save(self._state(trainer, pl_module), step=self.first_step + trainer.global_step)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        del trainer, pl_module
        self.saver.close()

    def _state(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, Any]:
        weights, moments = get_state_dict(module, trainer.optimizers, options=FLAT)
        return {"model": weights, "optimizer": moments}


if __name__ == "__main__":
    torch.manual_seed(0)
    callback = TitanCheckpoint(sys.argv[1], every=5)
    trainer = lightning.Trainer(
        max_steps=int(sys.argv[2]), callbacks=[callback], logger=False, enable_checkpointing=False, accelerator="cpu"
    )
    trainer.fit(BoringModel())
    print(f"from step {callback.first_step}, now {[i.step for i in titan_ckpt.list_checkpoints(sys.argv[1])]}")  # noqa: T201
