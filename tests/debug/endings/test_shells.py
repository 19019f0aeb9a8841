"""Bash tells of signals in the language of its user."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.debug.log_names.test_pods import STEPS, first_verdict

PEER = "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: [pair.cc:5] Connection closed by peer [10.0.0.2]:9\n"
ENDED = {
    "English": "./run.sh: line 14: 81233 Killed                  RANK=2 python train.py",
    "German": "./run.sh: Zeile 14: 81233 Speicherzugriffsfehler  (Speicherabzug geschrieben) RANK=2 python train.py",
    "German, killed": "run.sh: Zeile 14: 81233 Getötet                 RANK=2 python train.py",
    "Chinese": "run.sh: 行 14: 81233 已杀死               RANK=2 python train.py",
    "Chinese of bash 5": "run.sh: 第 14 行：81233 段错误              （核心已转储）RANK=2 python train.py",
    "traditional Chinese": "run.sh: 第 14 列：81233 強制結束              RANK=2 python train.py",
    "French": "run.sh : ligne 14 : 81233 Erreur de segmentation (core dumped) RANK=2 python train.py",
    "French, killed": "run.sh : ligne 14 : 81233 Processus arrêté      RANK=2 python train.py",
    "Spanish": "run.sh: línea 14: 81233 Violación de segmento  (`core' generado) RANK=2 python train.py",
    "Spanish, killed": "run.sh: línea 14: 81233 Terminado (killed)      RANK=2 python train.py",
    "Japanese": "run.sh: 14 行: 81233 強制終了            RANK=2 python train.py",
    "Japanese, a bus error": "run.sh: 14 行: 81233 バスエラー (コアダンプ) RANK=2 python train.py",
}


def culprits(folder: Path, line: str) -> tuple[int, ...]:
    (folder / "run.log").write_text(f"{STEPS}{line}\n{PEER}")
    return first_verdict(folder).culprits


@pytest.mark.parametrize("language", ENDED)
def test_signal_in_another_language_ended_its_rank(tmp_path: Path, language: str) -> None:
    assert culprits(tmp_path, ENDED[language]) == (2,)


@pytest.mark.parametrize(
    "line",
    [
        "run.sh: Zeile 14: 81233 Getötet                 python train.py",  # nothing tells which rank
        "run.sh: Zeile 14: 81233 Beendet                 RANK=2 python train.py",  # SIGTERM
        "run.sh: Zeile 14: 81233 Abgebrochen (Terminated) RANK=2 python train.py",
        "run.sh: línea 14: 81233 Terminado               RANK=2 python train.py",
        "Zeile 14: Getötet wurde RANK=2 nicht",
        "run.sh: Zeile 14: RANK=2: Befehl nicht gefunden",
    ],
)
def test_other_lines_accuse_nobody(tmp_path: Path, line: str) -> None:
    assert culprits(tmp_path, line) == ()
