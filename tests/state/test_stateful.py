"""Objects with a state of their own: modules, optimizers, schedulers, anything with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_ckpt.errors import LoadContractError
from titan_ckpt.loading.load import LoadPolicy, load
from titan_ckpt.saving.saver import save


def _job(steps: int) -> dict[str, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)],
        milestones=[2],
    )
    job = {"model": model, "optimizer": optimizer, "more": {"schedule": schedule, "step": 0}}
    for _ in range(steps):
        _train(job)
    return job


def _train(job: dict[str, Any]) -> float:
    job["optimizer"].zero_grad()
    loss = job["model"](torch.arange(6.0).view(2, 3)).square().sum()
    loss.backward()
    job["optimizer"].step()
    job["more"]["schedule"].step()
    return float(loss.detach())


def test_a_new_job_goes_on_exactly_where_the_old_one_was(tmp_path: Path) -> None:
    job = _job(4)
    job["more"]["step"] = 4
    save(str(tmp_path), job, step=4)
    fresh = _job(0)
    load(str(tmp_path), fresh)
    assert fresh["more"]["step"] == 4
    assert [_train(fresh) for _ in range(3)] == [_train(job) for _ in range(3)]


def test_objects_and_their_states_are_the_same_on_disk(tmp_path: Path) -> None:
    job = _job(2)
    save(str(tmp_path), {"model": job["model"].state_dict(), "optimizer": job["optimizer"].state_dict()}, step=1)
    fresh = _job(0)
    load(str(tmp_path), {"model": fresh["model"], "optimizer": fresh["optimizer"]})
    assert str(fresh["optimizer"].state_dict()) == str(job["optimizer"].state_dict())
    dcp.save({"optimizer": job["optimizer"]}, checkpoint_id=tmp_path / "theirs")
    fresh = _job(0)
    load(str(tmp_path / "theirs"), {"optimizer": fresh["optimizer"]})
    assert str(fresh["optimizer"].state_dict()) == str(job["optimizer"].state_dict())


def test_a_module_takes_no_more_than_it_has(tmp_path: Path) -> None:
    save(str(tmp_path), {"model": torch.nn.Linear(3, 2)}, step=1)
    model = torch.nn.Linear(3, 2, bias=False)
    before = model.weight.clone()
    with pytest.raises(LoadContractError, match=r"model\.bias: in the checkpoint but not in the state"):
        load(str(tmp_path), {"model": model})
    assert torch.equal(model.weight, before)
    load(str(tmp_path), {"model": model}, policy=LoadPolicy(extra="allow"))
    assert not torch.equal(model.weight, before)


class Loader:
    """Like a data loader: its state has other entries in the middle of an epoch."""

    def __init__(self) -> None:
        self.state: Any = {"epoch": 0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state", [{"epoch": 1, "workers": [{"at": 3, "rng": torch.arange(4)}], 7: ("a",)}, {}, {"epoch": {}}]
)
def test_an_object_gets_all_that_was_saved(state: Any, tmp_path: Path) -> None:
    loader = Loader()
    loader.state = {"epoch": 1, **state}
    save(str(tmp_path), {"loader": loader, "list": [loader]}, step=1)
    fresh = {"loader": Loader(), "list": [Loader()]}
    load(str(tmp_path), fresh)
    assert repr(fresh["loader"].state) == repr(loader.state)  # type: ignore[attr-defined]
