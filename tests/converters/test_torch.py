"""Import and export of plain torch files, under weights-only rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_models import config, raw, tensors, write_model
from titan_ckpt.checkpoint.open import open_checkpoint
from titan_ckpt.cli.main import main
from titan_ckpt.converters import export_hf
from titan_ckpt.converters.torch_file import export_torch, import_torch
from titan_ckpt.errors import AlreadyExistsError, DamagedError, NotFoundError, UnsafeContentError

CALLED: list[str] = []


class Canary:
    """Record in CALLED that a pickle ran code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (CALLED.append, ("ran",))


def test_nested_state_dict_goes_in_and_out(tmp_path: Path) -> None:
    state = {
        "model": {"a.weight": torch.tensor([[1.0, float("nan")], [-0.0, 2e-42]]), "b": torch.ones(3, dtype=torch.bfloat16).t()},
        "optimizer": {"state": {0: {"step": torch.tensor(4.0), "exp_avg": torch.zeros(0, 2)}}, "lr": 0.1},
        "epoch": 3,
    }  # fmt: skip
    torch.save(state, tmp_path / "in.pt")
    report = import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run@5"))
    assert (report.num_tensors, report.num_values) == (4, 2)
    export_torch(str(tmp_path / "run"), str(tmp_path / "out.pt"))
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert raw(found["model.a.weight"]) == raw(state["model"]["a.weight"])  # type: ignore[index]
    assert found["optimizer.state.0.exp_avg"].shape == (0, 2)
    assert found["optimizer.state.0.step"].shape == ()
    assert (found["optimizer.lr"], found["epoch"]) == (0.1, 3)


def test_state_dict_in_hugging_faces_names_becomes_a_model(tmp_path: Path) -> None:
    content = tensors(config())
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert (
        main(["convert", "from-torch", str(tmp_path / "pytorch_model.bin"), str(tmp_path / "run"), "--under", "model"])
        == 0
    )
    export_hf(str(tmp_path / "run"), str(tmp_path / "out"), config=config())
    reference = write_model(tmp_path / "in", config(), content)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


def test_only_a_part_goes_out_under_its_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}}, tmp_path / "in.pt")
    import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))
    assert (
        main(["convert", "to-torch", str(tmp_path / "run"), str(tmp_path / "out.pt"), "--only", "model", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 1
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == ["w"]
    with pytest.raises(NotFoundError, match="nothing below 'ema'"):
        export_torch(str(tmp_path / "run"), str(tmp_path / "ema.pt"), only="ema")


def test_file_that_wants_to_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": Canary()}, tmp_path / "evil.pt")
    with pytest.raises(UnsafeContentError, match=r"evil\.pt"):
        import_torch(str(tmp_path / "evil.pt"), str(tmp_path / "run"))
    assert CALLED == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [b"", b"garbage" * 20])
def test_file_that_is_no_torch_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.pt").write_bytes(data)
    with pytest.raises(DamagedError, match=r"in\.pt: not a torch file"):
        import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "in.pt")
    data = (tmp_path / "in.pt").read_bytes()
    (tmp_path / "in.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedError, match=r"in\.pt"):
        import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))


def test_bare_tensor_is_no_state_dict(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "in.pt")
    with pytest.raises(DamagedError, match="not a state dict"):
        import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))
    with pytest.raises(AlreadyExistsError, match="committed already"):
        import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))
    with pytest.raises(AlreadyExistsError, match=r"in\.pt"):
        export_torch(open_checkpoint(str(tmp_path / "run")), str(tmp_path / "in.pt"))


def test_a_saved_model_is_named_with_what_to_save(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "in.pt")
    with pytest.raises(UnsafeContentError) as caught:
        import_torch(str(tmp_path / "in.pt"), str(tmp_path / "run"))
    text = str(caught.value)
    assert "holds torch.nn.modules.linear.Linear" in text
    assert "save the state_dict() of a model" in text
    assert text.isprintable()
