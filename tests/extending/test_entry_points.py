"""`--module NAME` where an installed package offers NAME in the group `titan_ckpt.trainer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extending.test_own_code import GOOD
from tests.support.training_runs import read_losses
from titan_ckpt.cli.main import main
from titan_ckpt.errors import ConfigError
from titan_ckpt.trainer.config.extension import load_extension

CONFIG = """
train = { steps = 2, device = "cpu" }
data = { seq_len = 4 }
log = { tensorboard = false, progress = false }
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, as `pip install --target` fills one."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def _install(site: Path, package: str, entries: str, text: str) -> None:
    (site / package).mkdir()
    (site / package / "__init__.py").write_text("")
    (site / package / "parts.py").write_text(text)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[titan_ckpt.trainer]\n{entries}\n")


def test_a_package_gives_the_parts_of_a_run(site: Path, tmp_path: Path) -> None:
    _install(site, "tiny_net_package", "tiny-net = tiny_net_package.parts", GOOD)
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    run = tmp_path / "run"
    assert main(["train", str(config), "--module", "tiny-net", "--set", f"save.url={run}"]) == 0
    losses = read_losses(run)
    assert sorted(losses) == [1, 2]
    assert losses[2] < losses[1]


def test_an_entry_may_name_an_object(site: Path) -> None:
    text = GOOD + "\nclass Parts:\n    model = model\n    data = data\n"
    _install(site, "object_package", "as-object = object_package.parts:Parts", text)
    found = load_extension("as-object")
    assert (found.model.name, found.source) == ("net", "as-object")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("package", "entry", "text", "said"),
    [
        ("fails", "parts", "1 / 0", r"--module mine \(fails.parts\): cannot be imported: .*ZeroDivisionError"),
        ("lacks", "parts:Missing", "", r"cannot be imported: .*AttributeError"),
        ("empty", "parts", "", "--module mine: defines none of model, loss"),
    ],
)
def test_an_entry_that_cannot_be_used_is_named(site: Path, package: str, entry: str, text: str, said: str) -> None:
    _install(site, package, f"mine = {package}.{entry}", text)
    with pytest.raises(ConfigError, match=said):
        load_extension("mine")


@pytest.mark.parametrize("name", ["losss", "train_stp", "metric", "modell"])
def test_a_misspelt_name_beside_right_ones_is_refused(tmp_path: Path, name: str) -> None:
    module = tmp_path / "misspelt.py"
    module.write_text(f"from titan_ckpt.trainer import *\nhooks = Hooks()\n{name} = Hooks()\n")
    with pytest.raises(
        ConfigError, match=f"misspelt.py: defines {name}, which the trainer does not read; did you mean"
    ):
        load_extension(str(module))


def test_names_that_only_resemble_are_let_alone(tmp_path: Path) -> None:
    module = tmp_path / "resembling.py"
    text = "from titan_ckpt.trainer import *\nfrom torch import optim\nhooks = Hooks()\nlosses = [1.0]\n_models = 2\n"
    module.write_text(text)
    assert load_extension(str(module)).hooks is not None


def test_two_packages_with_one_name_are_refused(site: Path) -> None:
    for package in ("first_package", "second_package"):
        _install(site, package, f"same-name = {package}.parts", GOOD)
    with pytest.raises(ConfigError, match=r"several installed packages offer it \(first_package.parts, second_package"):
        load_extension("same-name")
