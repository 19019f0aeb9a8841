"""No screen and no picture of one shows a secret of the logs; and what is exported from the screens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.screen_pictures import press, screen_text
from titan_ckpt.console.picture import MARK
from titan_ckpt.errors import AlreadyExistsError, TitanError
from titan_ckpt.tui.app import TitanApp
from titan_ckpt.tui.data.content import find_content
from titan_ckpt.tui.data.incident import load_incident
from titan_ckpt.tui.export import export_report
from titan_ckpt.tui.rows import Role, row, truncate, without_secrets, wrapped
from titan_ckpt.tui.screenshot import settled
from titan_ckpt.tui.widgets.prompt import Prompt
from tools.paths import INCIDENTS

SECRET = "Zx9Qw8Er7Ty6Ui5Op4Kd"
PARTS = {SECRET[at : at + 4] for at in range(len(SECRET) - 3)}
LOG = f"""\
2026-11-22 10:00:00,000 INFO step 1 HF_TOKEN={SECRET}
2026-11-22 10:00:01,000 INFO reading https://me:{SECRET}@host/x
-----BEGIN PRIVATE KEY-----
{SECRET * 3}
{SECRET * 3}
-----END PRIVATE KEY-----
password: |
  {SECRET}
Traceback (most recent call last):
  File "/x/a.py", line 3, in f
    boom()
RuntimeError: cannot read https://me:{SECRET}@host/x?sig={SECRET} after {"a long time " * 20}
"""


def shown_parts(text: str) -> set[str]:
    return {part for part in PARTS if part in text}


def test_no_screen_shows_a_secret(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}.log").write_text(LOG)
    (tmp_path / "rank_2.log").write_bytes(
        b"\x00\xff\x1b]0;x\x07" * 5_000 + f"token={SECRET}".encode() + b"x" * 1_000_000
    )

    async def look() -> None:
        app = TitanApp(find_content(str(tmp_path)), clock=lambda: 1.8e9)
        async with app.run_test(size=(70, 40)) as pilot:
            await settled(app, pilot)
            for keys in (["1"], ["5"], ["5", "down", "y"], ["l", "l"], ["2"], ["3"], ["4"], ["6"], ["7"], ["8"]):
                await pilot.press(*keys)
                await settled(app, pilot)
                assert shown_parts(app.export_screenshot()) == set(), keys
            assert shown_parts(app.clipboard) == set()
            app.show_number(5)
            await settled(app, pilot)
            assert "***" in re.sub(r"<[^>]*>", "", app.export_screenshot())

    asyncio.run(look())


def test_a_secret_is_hidden_before_text_is_cut_or_wrapped() -> None:
    url = f"s3://key:{SECRET}@bucket/a/long/path"
    assert shown_parts(truncate(url, 20)) == set()
    assert shown_parts("".join(wrapped(f"reading {url} failed", 16))) == set()
    assert shown_parts(without_secrets(row(("HF_TOKEN=", Role.DIM), (SECRET, Role.BAD))).text) == set()
    plain = row(("step 3", Role.DIM), ("loss 2.5", Role.BAD))
    assert without_secrets(plain) is plain


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.html", "<!doctype html>"), ("a.md", MARK), ("a.txt", "SKIPPED_COLLECTIVE: "), ("a.json", '{"otherData"')],
)
def test_the_ending_of_a_file_says_which_report(name: str, start: str, tmp_path: Path) -> None:
    path = tmp_path / name
    assert export_report(load_incident(str(INCIDENTS / "skip")), 1.8e9, str(path)) == f"report written to {path}"
    assert path.read_text().startswith(start)
    assert "/srv/job/faults.py:122" in path.read_text()
    path.write_text("theirs")
    with pytest.raises(AlreadyExistsError, match=r"not written: .* another name"):
        export_report(load_incident(str(INCIDENTS / "skip")), 1.8e9, str(path))
    assert [path.read_text(), *tmp_path.iterdir()] == ["theirs", path]


@pytest.mark.parametrize("name", ["report", "report.pdf", "a\0b.html", "none/a.html"])
def test_a_report_that_cannot_be_written_says_why(name: str, tmp_path: Path) -> None:
    with pytest.raises(TitanError, match=r"ends with|null|no folder"):
        export_report(load_incident(str(INCIDENTS / "skip")), 1.8e9, str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


async def test_x_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = TitanApp(find_content(str(INCIDENTS / "skip")), clock=lambda: 1.8e9)
    monkeypatch.chdir(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(app, pilot)
        await press(app, pilot, "x enter")
        assert "report written to incident-report.html" in screen_text(app)
        await press(app, pilot, "x")
        app.query_one(Prompt).value = "report.pdf"
        await press(app, pilot, "enter")
        assert "ends with .html, .md, .txt, .json" in screen_text(app)
    assert [path.name for path in tmp_path.iterdir()] == ["incident-report.html"]
