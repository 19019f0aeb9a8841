"""What bash says in other languages of a process that a signal ended: `run.sh: Zeile 14: 4711 Getötet  RANK=2 python train.py`.

Words from the translations of bash 5.2 and glibc 2.36 (`po/de.po` and so on, as Debian installs them), in which bash finds the
place of a line and a signal's name.
"""

from __future__ import annotations

import re

_WORDS = {
    "Segmentation fault": (
        "Speicherzugriffsfehler", "Adressierungsfehler", "段错误", "程式記憶體區段錯誤", "Erreur de segmentation",
        "Violación de segmento", "セグメンテーションフォルト", "Errore di segmentazione", "Falha de segmentação",
        "세그멘테이션 오류", "세그먼테이션 오류", "Ошибка сегментирования", "Ошибка сегментации", "Naruszenie ochrony pamięci",
    ),
    "Killed": (
        "Getötet", "Abgebrochen (Killed)", "已杀死", "強制結束", "Processus arrêté", "Tué", "Terminado (killed)", "Matado",
        "強制終了", "Ucciso", "Morto (Killed)", "Morto", "죽었음", "Убито", "Убит", "Unicestwiony",
    ),
    "Aborted": ("Abgebrochen", "已放弃", "中止", "Abandon", "Abortado", "Annullato", "중지됨", "Аварийный останов", "Przerwane"),
    "Bus error": (
        "Bus-Zugriffsfehler", "Bus-Fehler", "总线错误", "匯流排錯誤", "Erreur du bus", "Erreur de bus", "Error del bus",
        "バスエラー", "Errore di bus", "Erro no barramento", "Erro do barramento", "버스 오류", "Ошибка шины", "Błąd szyny",
    ),
    "Terminated": ("Beendet", "Abgebrochen (Terminated)", "已终止", "終止", "Complété", "Terminé", "Terminado", "Terminato"),
}  # fmt: skip
_ENGLISH = {word: english for english, words in _WORDS.items() for word in words}
_WORD = "|".join(re.escape(word) for word in sorted(_ENGLISH, key=len, reverse=True))
# Before the number of the line, or behind it; older translations write `行 14: `.
PLACES = ("Zeile ", "ligne ", "línea ", "riga ", "linha ", "줄 ", "строка ", "linia ", "第 ", "行")
_LINE = re.compile(
    rf"(?P<script>[^\s:：]{{1,200}}) ?[:,] (?:(?:{'|'.join(PLACES)}) ?)?(?P<line>\d{{1,9}}) ?[行列]?[:：] ?"
    rf"(?P<pid>\d{{1,9}}) (?P<word>{_WORD}) *(?:[(（][^()（）]{{1,60}}[)）] ?)?(?P<command>(?:\s.{{0,400}})?)$"
)


def in_english(text: str) -> str:
    """The line as bash writes it in English; "" if it is none of its lines.

    >>> in_english("run.sh: 第 14 行：4711 已杀死               RANK=1 python train.py")
    'run.sh: line 14: 4711 Killed RANK=1 python train.py'
    """
    match = _LINE.match(text)
    if match is None:
        return ""
    return (
        f"{match['script']}: line {match['line']}: {match['pid']} {_ENGLISH[match['word']]} {match['command'].strip()}"
    )


_NODE = re.compile(r"--node[_-]rank[ =](\d{1,5})\b")
_PER_NODE = re.compile(r"--nproc[_-]per[_-]node[ =](\d{1,4})\b")


def first_rank_of(text: str) -> int | None:
    """The first rank of a host by the command that started its launcher there, as `set -x` prints it; None if it is none.

    >>> first_rank_of("+ torchrun --nnodes=2 --node_rank=1 --nproc_per_node=4 train.py")
    4
    """
    node, size = _NODE.search(text), _PER_NODE.search(text)
    return int(node[1]) * int(size[1]) if node is not None and size is not None else None
