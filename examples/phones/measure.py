"""Measure the pipeline on simulated phones: by choice, by number of peers, and with kills, joins and cut links.

    python -m examples.phones.measure ALBUM --out results.json --runs "all:4;unmodified:4;all:1;unmodified:1"
    python -m examples.phones.measure ALBUM --out results.json --faults

An album is made by `python -m examples.phones.pictures`. Results are appended; docs/phones.md shows them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from examples.phones.choices import FRUGAL, VARIANTS, Choices
from examples.phones.phones import Phones, Strength
from examples.phones.pictures import TRUTH, read_truth
from examples.phones.score import adjusted_rand_index
from scripts.hosts_network import Network, enter

HOSTS = tuple(f"phone{number}" for number in range(1, 9))
POLL_S, LIMIT_S = 0.2, 3000.0
STAGES = ("descriptors", "vocabulary", "vectors", "clusters")
_numbers = itertools.count()


@contextmanager
def phones_for(network: Network, album: Path, choices: Choices, count: int, strength: Strength) -> Iterator[Phones]:
    """Phones in a folder of their own, which goes with them."""
    with (
        tempfile.TemporaryDirectory(prefix=f"phones-{next(_numbers)}-") as folder,
        Phones(network, HOSTS[:count], Path(folder), album, choices, strength) as phones,
    ):
        yield phones


def until(happened: Callable[[], bool], phones: Phones) -> None:
    """Wait; RuntimeError with the phones' logs if it does not happen."""
    for _ in range(round(LIMIT_S / POLL_S)):
        if happened():
            return
        time.sleep(POLL_S)
    last = {name: phone.read()[-1:] for name, phone in phones.running.items()}
    raise RuntimeError(f"nothing happened in {LIMIT_S:.0f} s: {last}")


def run_plain(network: Network, album: Path, name: str, count: int, strength: Strength) -> dict[str, Any]:
    """One variant on phones that all stay."""
    with phones_for(network, album, VARIANTS[name], count, strength) as phones:
        for host in phones.names:
            phones.start(host, "--save-every", "20")
        until(lambda: all(phone.has("labels") for phone in phones.running.values()), phones)
        return {"variant": name, "peers": count, **measured(phones, album, phones.names)}


def run_with_kill(network: Network, album: Path, strength: Strength) -> dict[str, Any]:
    """Three phones; once blocks are committed, the first dies; the two others end the work."""
    with phones_for(network, album, FRUGAL, 3, strength) as phones:
        for host in phones.names:
            phones.start(host, "--save-every", "1")
        until(lambda: phones.running["phone2"].count("saved", stage="descriptors") >= 2, phones)
        phones.kill("phone1")
        rest = phones.names[1:]
        until(lambda: all(phones.running[name].has("labels") for name in rest), phones)
        return {"fault": "rank 0 killed", **measured(phones, album, rest)}


def run_with_join(network: Network, album: Path, strength: Strength) -> dict[str, Any]:
    """Two phones; once blocks are committed, a third comes."""
    with phones_for(network, album, FRUGAL, 3, strength) as phones:
        for host in phones.names[:2]:
            phones.start(host, "--save-every", "1", "--look-every", "1")
        until(lambda: phones.running["phone2"].count("saved", stage="descriptors") >= 2, phones)
        phones.start("phone3", "--save-every", "1")
        until(lambda: all(phone.has("labels") for phone in phones.running.values()), phones)
        return {"fault": "a third joins", **measured(phones, album, phones.names)}


def run_with_cut(network: Network, album: Path, strength: Strength) -> dict[str, Any]:
    """Three phones; the link of one is cut, silently, and restored once the others are at work without it."""
    with phones_for(network, album, FRUGAL, 3, strength) as phones:
        for host in phones.names:
            phones.start(host, "--save-every", "1", "--timeout", "15", "--look-every", "1")
        until(lambda: phones.running["phone2"].count("saved", stage="descriptors") >= 2, phones)
        network.cut("phone3")
        until(lambda: phones.running["phone1"].has("met", size=2) or phones.running["phone1"].has("labels"), phones)
        network.restore("phone3")
        until(lambda: all(phone.has("labels") for phone in phones.running.values()), phones)
        return {"fault": "a link cut and restored", **measured(phones, album, phones.names)}


def measured(phones: Phones, album: Path, names: Sequence[str]) -> dict[str, Any]:
    """Times, traffic and quality of a run that is over, from what the phones `names` have said."""
    events = [event for name in names for event in phones.running[name].read() if event["event"] != "labels"]
    labels = phones.running[names[0]].events[-1]["labels"]
    started = min(event["time"] for event in events)
    ended = {stage: [each["time"] for each in events if _is(each, "finished", stage)] for stage in STAGES}
    done = [event for event in events if event["event"] == "done"]
    resumed = {
        (each["generation"], each["size"], each["stage"], each["step"]) for each in events if each["event"] == "resumed"
    }
    return {
        "pictures": len(labels),
        "seconds": max(each["time"] for each in done) - started,
        "stage_ends": {stage: max(times) - started for stage, times in ended.items() if times},
        "work_cpu_s": max(each["cpu_s"] for each in done),
        "phone_cpu_s": max(phones.cpu_s(name) for name in names),
        "held_back": min(phones.was_held_back(name) for name in names),
        "sent_mb": max(phones.sent_bytes(name) for name in names) / 1e6,
        "ari": adjusted_rand_index(read_truth(album), labels) if (album / TRUTH).exists() else None,
        "are_equal": all(phones.running[name].events[-1]["labels"] == labels for name in names),
        "resumed": sorted(resumed),
    }


def _is(event: dict[str, Any], name: str, stage: str) -> bool:
    return {"event": name, "stage": stage}.items() <= event.items()


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; each result is written when it is there."""
    parser = argparse.ArgumentParser(description="measure clustering on simulated phones")
    parser.add_argument("album", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines to append to")
    parser.add_argument("--runs", default="", help="VARIANT:PEERS;..., variants of choices.py")
    parser.add_argument("--faults", action="store_true", help="the runs with kills, joins and cut links")
    parser.add_argument(
        "--cores", type=float, default=Strength().cores, help="the part of a processor that a phone has"
    )
    options = parser.parse_args(arguments)
    code = enter("examples.phones.measure", arguments)
    if code is not None:
        return code
    network, strength = Network(HOSTS), Strength(cores=options.cores)
    runs: list[Callable[[], dict[str, Any]]] = []
    for text in filter(None, options.runs.split(";")):
        name, _, count = text.partition(":")
        runs.append(partial(run_plain, network, options.album, name, int(count), strength))
    if options.faults:
        faults = (run_with_kill, run_with_join, run_with_cut)
        runs += [partial(run, network, options.album, strength) for run in faults]
    for run in runs:
        result = {"cores": strength.cores, "link_bits_per_s": strength.link_bits_per_s, **run()}
        with open(options.out, "a") as file:
            file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
