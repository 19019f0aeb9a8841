"""One text that holds several logs. The forms are those of `tail`, `more`, `clush -b`, `grep` and of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from titan_ckpt.debug import diagnose, open_run
from titan_ckpt.debug.incident.kinds import VerdictKind
from titan_ckpt.debug.incident.records import Verdict
from titan_ckpt.debug.read.reports.sections import sections

TRACEBACK = ("Traceback (most recent call last):", '  File "/job/a.py", line 3, in <module>', "KeyError: 1")
STEPS = [f"step {step} loss 2.{step}" for step in range(3)]
OF_HOSTS = {
    "clush": "---------------\nfit-{}\n---------------",
    "clush, folded": "---------------\nfit-{} (1)\n---------------",
    "kubectl": "$ kubectl logs -n team fit-{} -c pytorch",
    "kubectl, options before and after": "$ kubectl logs -f --tail=100 pod/fit-{} --timestamps",
}
HEADINGS: dict[str, Callable[[int], str]] = {
    "tail": lambda rank: f"==> logs/rank_{rank}.log <==",
    "tail, torchrun's folder": lambda rank: f"==> /tmp/x/none_a1/attempt_0/{rank}/stderr.log <==",
    "more": lambda rank: f"::::::::::::::\nrank{rank}.log\n::::::::::::::",
    "ruled": lambda rank: f"===== rank {rank} =====",
    "dashes": lambda rank: f"--- Rank {rank} ---",
    "bold": lambda rank: f"**Rank {rank}:**",
    "colon": lambda rank: f"rank {rank}:",
    "cat": lambda rank: f"(base) ada@node01:~/run$ cat logs/rank_{rank}.log",
    "summary": lambda rank: f"<details><summary>rank {rank} log</summary>\n\n```",
}


def written(heading: Callable[[int], str], lines: Sequence[str] = STEPS) -> str:
    closed = "```\n</details>\n" if heading(0).endswith("```") else ""
    return "\n".join("\n".join([heading(rank), *lines, *(TRACEBACK if rank == 2 else ()), closed]) for rank in range(4))


def judged(folder: Path, text: str, name: str = "job.log") -> Verdict:
    (folder / name).write_text(text)
    return diagnose(open_run(str(folder)))[0]


@pytest.mark.parametrize("form", HEADINGS)
def test_a_heading_says_whose_the_lines_are(form: str, tmp_path: Path) -> None:
    text = written(HEADINGS[form])
    top = judged(tmp_path, text)
    assert (top.verdict, top.culprits, top.file) == (VerdictKind.RANK_DIED, (2,), "/job/a.py")
    [said] = [item.source for item in top.evidence if "KeyError" in item.text]
    path, number = said.rsplit(":", 1)
    assert path.startswith("job.log/")
    assert "KeyError" in "\n".join(text.split("\n")[int(number) - 3 : int(number)])


@pytest.mark.parametrize("form", OF_HOSTS)
def test_a_heading_names_a_host_or_a_pod(form: str) -> None:
    found = sections(written(OF_HOSTS[form].format))
    assert [name for name, _ in found] == [f"fit-{rank}.log" for rank in range(4)]


def found_by_grep(form: str, *, with_context: bool) -> list[str]:
    """What grep shows of four logs: matches, and the lines around them."""
    lines = []
    for rank in range(4):
        for number, line in enumerate((*STEPS, *(TRACEBACK if rank == 2 else ())), 7):
            said = form.format(f"logs/rank_{rank}.log", number, line)
            is_around = with_context and ("rror" not in line and number > 7)
            lines.append(said.replace(".log:", ".log-").replace(f"-{number}:", f"-{number}-") if is_around else said)
        lines.append("--")
    return lines


@pytest.mark.parametrize("form", ["{0}:{2}", "{0}:{1}:{2}"])
@pytest.mark.parametrize("with_context", [False, True])
def test_the_file_of_each_line_that_grep_found(form: str, with_context: bool, tmp_path: Path) -> None:
    top = judged(tmp_path, "\n".join(found_by_grep(form, with_context=with_context)))
    assert (top.verdict, top.culprits, top.file) == (VerdictKind.RANK_DIED, (2,), "/job/a.py")


@pytest.mark.parametrize("line", ["2026-11-28 10:00:01 step 1", "10:00:01 step 1", "3: step 1", "12 steps"])
def test_grep_takes_nothing_of_a_line(line: str) -> None:
    text = "".join(f"rank_{rank}.log:{line}\nrank_{rank}.log-{line}\n" for rank in range(2))
    assert {said for name, part in sections(text) if name for _, said in part} == {line}
    names = {name for name, _ in sections(f"a.log:x\nb.log:y\na.log-12-model.out: {line}\n")}
    assert names == {"a.log", "b.log", ""}


def test_lines_that_tail_follows_come_back_to_their_file(tmp_path: Path) -> None:
    parts = [f"==> rank_{rank}.log <==\nstep {step}\n" for step in range(3) for rank in range(3)]
    top = judged(tmp_path, "\n".join([*parts, "==> rank_1.log <==", *TRACEBACK, "", "==> rank_0.log <==", "step 3"]))
    assert (top.verdict, top.culprits) == (VerdictKind.RANK_DIED, (1,))


GREETINGS = "".join(f"=== rank {rank} ===\ndevice: cuda:{rank}\nmemory: 80 GB\n" for rank in range(4))
NO_SECTIONS = {
    "greetings of a program": GREETINGS + "\n".join([*STEPS, *TRACEBACK]),
    "headings again and again": "\n".join(
        f"=== rank {rank} ===\nstep {step}" for step in range(3) for rank in range(2)
    ),
    "one after the other": "".join(
        f"=== rank {rank} ===\n2026-11-28 10:0{rank}:00 step 1\n2026-11-28 10:0{rank}:09 step 2\n" for rank in range(3)
    ),
    "one section": f"==> job.log <==\n{STEPS[0]}\n",
    "a heading below other lines": "start\n" + written(HEADINGS["ruled"]),
    "a program that tells of files": "shard_0.txt: ok\nshard_1.txt: ok\n" + "\n".join(STEPS),
    "times": "12:30:\nstep 1\n12:31:\nstep 2",
}


@pytest.mark.parametrize("name", NO_SECTIONS)
def test_what_only_looks_like_headings_is_one_log(name: str) -> None:
    assert sections(NO_SECTIONS[name]) == []


def test_what_follows_another_command_is_of_no_file() -> None:
    prompt = "ada@n1:~$ "
    text = (
        "".join(f"{prompt}cat rank_{rank}.log\nstep 1\n" for rank in range(2)) + f"{prompt}dmesg\nKilled process 12\n"
    )
    for said in (text, text.replace("\n", "\r\n")):
        assert dict(sections(said))[""] == [(6, "Killed process 12"), (7, "")]


def test_prose_around_fences_is_of_nobody() -> None:
    text = "It hangs. Rank 0 says:\n\n```\nstep 1\n```\n\nand rank 1:\n```text\nstep 2\n```\nWhy?\n"
    assert not sections(text)  # neither line is a heading
    found = dict(sections(text.replace("It hangs. Rank 0 says", "Rank 0").replace("and rank", "rank")))
    assert found["rank_1.log"] == [(9, "step 2")]
    assert (11, "Why?") in found[""]
    assert (
        dict(
            sections(text.replace("It hangs. Rank 0 says", "Rank 0").replace("and rank", "rank").replace("\n", "\r\n"))
        )
        == found
    )


def test_an_earlier_attempt_in_a_text_is_history(tmp_path: Path) -> None:
    parts = [f"==> x/attempt_{attempt}/{rank}/stderr.log <==\nstep 1\nstep 2" for attempt in (0, 1) for rank in (0, 1)]
    parts[1] += "\n" + "\n".join(TRACEBACK)
    assert judged(tmp_path, "\n".join(parts)).culprits == ()


def test_a_page_beside_logs_is_no_log(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank_{rank}.log").write_text("\n".join(STEPS) + "\n")
    text = written(HEADINGS["summary"])
    assert judged(tmp_path, text, "README.md").culprits == ()
    assert judged(tmp_path, text, "notes.txt").culprits == (2,)
