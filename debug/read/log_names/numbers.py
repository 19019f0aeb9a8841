"""Logs whose names, or whose folders' names, differ in one number alone, `0.log` to `3.log` or `worker_0/log.txt` to
`worker_3/log.txt`: the number is the rank where they were written side by side.

Names of that form are made by `srun --output=%t.log`, Azure ML (`std_log_process_00.txt`), Paddle (`workerlog.0`:
python/paddle/distributed/launch/controllers/collective.py) and users' own loops. Rotated parts of one log and the attempts of one
process have such names too, but follow each other in time.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from titan_ckpt.debug.read.log_names.columns import NO_RANKS, by_column
from titan_ckpt.debug.read.text.job_text import NOBODY, OWN, JobText
from titan_ckpt.debug.read.text.streams import Stream

MOST_TEXTS = 65_536
_NAMES = (
    re.compile(r"(?P<before>workerlog\.)(?P<number>\d{1,6})(?P<after>)$"),
    re.compile(r"(?P<before>[^/]*?)(?P<number>\d{1,6})(?P<after>(?:\.[A-Za-z]{1,8}){1,3})$"),
)
_FOLDERS = (re.compile(r"(?P<before>[^/\d]{0,60})(?P<number>\d{1,6})(?P<after>/[^/]{1,255})$"),)
_OF_LAUNCHERS = ("std_log_process_", "workerlog.")  # which number processes


def name_ranks(texts: Sequence[JobText]) -> None:
    """Give the lines of logs to the ranks that introduce themselves in them, or label each of its lines; or of numbered logs to
    the ranks of these numbers, where no name and no other line says otherwise."""
    if any(map(_is_launchers, texts)):
        return
    speakers = [(rank, text) for text in texts if (rank := _speaker(text)) is not None]
    own = dict(speakers)
    is_whole = 1 < len(own) == len(speakers) and set(own) == set(range(len(own)))
    has_places = any(writer[0] in _PLACES for text in texts for writer in text.writers)
    if (is_whole and len(own) == len(texts)) or has_places or not _have_numbers(texts):
        _give_own_texts(own if is_whole else {})
    if has_places and not is_whole:
        _number_as_others(texts)


def _speaker(text: JobText) -> int | None:
    """The rank that a log is of by its lines: the one that introduces itself, else the only one whose label stands there."""
    if text.introduced is not None:
        return text.introduced
    labelled = {writer for writer in text.writers if writer != NOBODY}
    writer = labelled.pop() if len(labelled) == 1 else NOBODY
    return writer[2] if writer[0] == "rank" else None


def _number_as_others(texts: Sequence[JobText]) -> None:
    """Give logs in which nobody says who writes to the ranks of their numbers, if two others at least are of theirs, and none of
    another."""
    for found in (
        *_numbered(texts, _NAMES, depth=1, are_any=True),
        *_numbered(texts, _FOLDERS, depth=2, are_any=True),
    ):
        numbered = [(number, text) for number, of_number in found.items() for text in of_number]
        said = {number: rank for number, text in numbered if (rank := _speaker(text)) is not None}
        if len(said) > 1 and all(number == rank for number, rank in said.items()):
            for number, text in numbered:
                if number not in said and set(text.writers) == {NOBODY}:
                    text.writers[("rank", "", number)] = text.writers.pop(NOBODY)


def name_recorded(texts: Sequence[JobText], num_ranks: int) -> None:
    """Give a log to the one of `num_ranks` recorded ranks whose recorder speaks there: a console has a line of each."""
    if num_ranks > 1:
        for text in texts:
            if len(text.recorded) == 1 and not _is_launchers(text):
                _give_own_texts({min(text.recorded): text})


def _give_own_texts(own: Mapping[int, JobText]) -> None:
    """Give each text to the one rank that introduces itself in it, where no other rank writes there."""
    for rank, text in own.items():
        if set(text.writers) <= {NOBODY, ("rank", "", rank)}:
            text.writers[(OWN, "", rank)] = text.writers.pop(NOBODY, Stream(source=text.source))


def _have_numbers(texts: Sequence[JobText]) -> bool:
    """Give numbered logs to the ranks of their numbers; whether they have such."""
    complete = (
        _numbered(texts, _NAMES, depth=1)
        or _numbered(texts, _FOLDERS, depth=2)
        or by_column(texts)
        or _introduced(texts)
    )
    if len(complete) != 1 or _is_denied(complete[0]):
        return False
    if _are_introduced(complete[0]) or _are_of_launchers(complete[0]) or _are_side_by_side(complete[0]):
        for number, of_number in complete[0].items():
            for text in of_number:
                text.writers[("rank", "", number)] = text.writers.pop(NOBODY, Stream(source=text.source))
    return True


def _introduced(texts: Sequence[JobText]) -> list[dict[int, list[JobText]]]:
    """Logs whose names count something else, as HTCondor's `job.0.out`, but whose ranks say that they have these numbers."""
    return [found for found in _numbered(texts, _NAMES, depth=1, are_any=True) if _are_introduced(found)]


def _are_introduced(logs: Mapping[int, Sequence[JobText]]) -> bool:
    return all(any(text.introduced == number for text in found) for number, found in logs.items())


def _numbered(
    texts: Sequence[JobText], patterns: Sequence[re.Pattern[str]], *, depth: int, are_any: bool = False
) -> list[dict[int, list[JobText]]]:
    """The logs of each folder by the number in the last `depth` parts of their paths, where these are complete. `are_any`: of
    names, too, that say what else they count."""
    folders: defaultdict[str, defaultdict[str, dict[int, JobText]]] = defaultdict(lambda: defaultdict(dict))
    for text in texts[:MOST_TEXTS]:
        parts = text.source.split("/")
        name = "/".join(parts[-depth:])
        match = next((found for pattern in patterns if (found := pattern.match(name))), None)
        if match is None or (not are_any and match["before"] not in _OF_LAUNCHERS and NO_RANKS.search(match["before"])):
            continue
        folders["/".join(parts[:-depth])][f"{match['before']}#{match['after']}"][int(match["number"])] = text
    return [found for by_name in folders.values() for found in _complete(by_name)]


_PLACES = ("rank", "local", "task", "node", "host", "pid")


def _is_launchers(text: JobText) -> bool:
    return text.endings.is_elastic or text.endings.has_launcher


_FIRST = re.compile(r"(?i:master|chief|head|launcher)[._-]?#")


def _complete(by_name: Mapping[str, Mapping[int, JobText]]) -> list[dict[int, list[JobText]]]:
    """The logs of a folder by their number, if each form of name counts from 0 without a gap; [] else, or beside the log of a
    process that is none of these, such as `job-master-0.log`."""
    found: defaultdict[int, list[JobText]] = defaultdict(list)
    forms = [of_name for of_name in by_name.values() if len(of_name) > 1]
    if (
        not forms
        or any(map(_FIRST.search, by_name))
        or any(set(of_name) != set(range(len(forms[0]))) for of_name in forms)
    ):
        return []
    for of_name in forms:
        for number, text in of_name.items():
            found[number].append(text)
    return [dict(found)]


def _is_denied(logs: Mapping[int, Sequence[JobText]]) -> bool:
    """Whether a rank introduces itself in a log of another number: then each log holds several. Or they are jobs apart."""
    if len({text.apart for found in logs.values() for text in found} - {""}) > 1:
        return True
    return any(text.introduced not in (None, number) for number, found in logs.items() for text in found)


def _are_of_launchers(logs: Mapping[int, Sequence[JobText]]) -> bool:
    """Whether a launcher named these logs, by the numbers of its processes."""
    names = [text.source.rpartition("/")[2] for of_number in logs.values() for text in of_number]
    return any(all(name.startswith(word) for name in names) for word in _OF_LAUNCHERS)


def _are_side_by_side(logs: Mapping[int, Sequence[JobText]]) -> bool:
    """Whether there was a moment at which all of these logs were written."""
    spans = [_span(of_number) for of_number in logs.values()]
    known = [span for span in spans if span is not None]
    return len(known) == len(spans) and max(begin for begin, _ in known) < min(end for _, end in known)


def _span(texts: Sequence[JobText]) -> tuple[float, float] | None:
    """When the first and the last line with a time were written."""
    begins = [text.began_s for text in texts if text.began_s is not None]
    ends = [stream.time_s for text in texts for stream in text.writers.values() if stream.time_s is not None]
    return (min(begins), max(ends)) if begins and ends else None
