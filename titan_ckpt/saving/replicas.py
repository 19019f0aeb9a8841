"""Copies of the same elements on several ranks: one is stored, so a save first compares them all.

Every rank digests its copies while it stages, which adds no exchange: the digests travel with the rank's part. Boxes that the
same ranks hold are digested together, in at most `MAX_BUCKETS` buckets, so that a part stays small however many tensors there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from titan_ckpt.checkpoint.kinds import Choice
from titan_ckpt.errors import TitanError
from titan_ckpt.format.digest import digest
from titan_ckpt.sharding.placement import Shape


class Replicas(Choice):
    """What a save does with elements that several ranks hold: compare all copies, or store the lowest rank's unseen."""

    EQUAL = "equal"
    FIRST = "first"


MAX_BUCKETS = 256
SHOWN = 3
BoxKey = tuple[str, tuple[Shape, Shape]]
Holder = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Boxes that the same ranks hold; `items[rank]` are indices into that rank's shards, in the same order on every rank."""

    fqns: tuple[str, ...]
    items: dict[int, list[int]]


def buckets_of(shared: Iterable[tuple[BoxKey, Sequence[Holder]]]) -> list[Bucket]:
    """The boxes that several ranks hold, in buckets; `shared` has each box with its (rank, index) holders."""
    together: dict[tuple[int, ...], list[tuple[BoxKey, Sequence[Holder]]]] = {}
    for box, holders in shared:
        together.setdefault(tuple(rank for rank, _ in holders), []).append((box, holders))
    found = []
    for ranks, boxes in sorted(together.items()):
        boxes.sort(key=lambda pair: pair[0])
        per_bucket = -(-len(boxes) // MAX_BUCKETS)
        for start in range(0, len(boxes), per_bucket):
            part = boxes[start : start + per_bucket]
            items = {rank: [holders[n][1] for _, holders in part] for n, rank in enumerate(ranks)}
            found.append(Bucket(fqns=tuple(dict.fromkeys(fqn for (fqn, _), _ in part)), items=items))
    return found


def bucket_digests(copies: Sequence[Sequence[int]], fingerprint: Callable[[int], bytes]) -> list[bytes]:
    """One digest for each bucket of a rank, of the fingerprints of the shards in it."""
    return [digest(b"".join(map(fingerprint, bucket))) for bucket in copies]


def compare_copies(buckets: Sequence[Bucket], digests: Sequence[Sequence[bytes]], step: int) -> None:
    """TitanError if two ranks hold different bytes for the same elements; `digests[rank]` are those of its buckets, in order."""
    position = [0] * len(digests)
    for bucket in buckets:
        found: dict[int, bytes] = {}
        for rank in bucket.items:
            found[rank] = digests[rank][position[rank]]
            position[rank] += 1
        first = min(found)
        others = [rank for rank, value in found.items() if value != found[first]]
        if others:
            names = ", ".join(bucket.fqns[:SHOWN]) + (
                f" or {len(bucket.fqns) - SHOWN} more" if len(bucket.fqns) > SHOWN else ""
            )
            raise TitanError(
                f"step {step}: {names}: the copy on rank {others[0]} differs from the one on rank {first}, and only one of them "
                f"would be stored. If each rank has a value of its own (a random generator, statistics of its batches), put the "
                f"rank into the name; else the ranks have drifted apart. SaveOptions(replicas='first') stores rank {first}'s"
            )
