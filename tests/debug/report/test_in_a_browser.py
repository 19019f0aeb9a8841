"""The HTML report in a headless browser without a network, where one is installed: it opens, whole, and reports no error."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.simulated_jobs import random_scenario, write
from titan_ckpt.cli.main import main
from tools.paths import INCIDENTS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# `--dump-dom` prints the page as it stands once its scripts have run; what they log goes to standard error.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as the browser holds it, and what its console says."""
    assert BROWSER is not None
    found = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={profile}", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    return found.stdout, [line for line in found.stderr.splitlines() if "CONSOLE" in line or "ERR_" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("num_ranks", [4, 1024])
def test_the_page_opens_without_a_network_and_without_errors(num_ranks: int, tmp_path: Path) -> None:
    folder = INCIDENTS / "sigkill"
    if num_ranks > 4:
        folder = tmp_path / "of"
        folder.mkdir()
        write(next(s for seed in range(100) if (s := random_scenario(seed, (num_ranks,))).fault != "none"), folder)
    page = tmp_path / "report.html"
    assert main(["debug", str(folder), "--html", str(page)]) in (1, 4)
    shown, said = opened(page, tmp_path / "profile")
    assert said == []
    titles = re.findall(r"<title>(.*?)</title>", page.read_text())
    assert titles == re.findall(r"<title>(.*?)</title>", shown)
    assert shown.count("<tr") == page.read_text().count("<tr")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_an_error_of_a_page_is_seen(tmp_path: Path) -> None:
    """So that no error found above means that there is none."""
    page = tmp_path / "wrong.html"
    page.write_text(
        "<!doctype html><title>x</title><script>nothing.at.all()</script><img src='https://example.org/a.png'>"
    )
    _, said = opened(page, tmp_path / "profile")
    assert any("ReferenceError" in line for line in said)
