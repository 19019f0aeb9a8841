"""Sending the bytes of a batch from its reader to all its holders: a binomial tree over the job's gloo group, piece by piece."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_ckpt.loading.shared.agreement import UnsentError
from titan_ckpt.loading.shared.shares import Batch
from titan_ckpt.state.exchange import MAX_LINE, RankGroup, text_of

PIECE_BYTES = 8 << 20
UNDER_WAY_BYTES = 256 << 20
COMES, FAILS = 1, 0


def neighbours(holders: Sequence[int], reader: int, rank: int) -> tuple[int | None, list[int]]:
    """(the rank that `rank` receives a batch from, those that it sends it to); the reader has no sender.

    >>> [neighbours((0, 2, 4, 6, 8), 4, rank) for rank in (4, 0, 2, 6, 8)]
    [(None, [0, 2, 8]), (4, [6]), (4, []), (0, []), (4, [])]
    """
    line = [reader, *(each for each in holders if each != reader)]
    place = line.index(rank)
    top = 1 << (place.bit_length() - 1) if place else 0
    step, receivers = 2 * top or 1, []
    while place + step < len(line):
        receivers.append(line[place + step])
        step *= 2
    return (line[place - top] if place else None), receivers


class Tree:
    """This rank's sends and receives. Nothing is waited for after `give_up_at`; a rank that is lost is not waited for again."""

    def __init__(self, ranks: RankGroup, give_up_at: float) -> None:
        self.rank = ranks.rank
        self._ranks, self._give_up_at = ranks, give_up_at
        self._lost: dict[int, str] = {}
        self._sent: deque[tuple[int, dist.Work, torch.Tensor]] = deque()
        self._under_way_bytes = 0

    def send(self, batch: Batch, memory: memoryview | None) -> None:
        """Send a batch of this rank's, or, with None, the word that it will not come."""
        _, receivers = neighbours(batch.holders, batch.reader, self.rank)
        self._announce(batch, receivers, FAILS if memory is None else COMES)
        for piece in _pieces(memory):
            self._pass_on(batch, receivers, piece)

    def receive(self, batch: Batch, memory: memoryview) -> None:
        """Receive a batch and pass it on. UnsentError if it does not come."""
        sender, receivers = neighbours(batch.holders, batch.reader, self.rank)
        assert sender is not None
        word = torch.tensor([FAILS], device="cpu")
        self._get(batch, sender, word)
        if sender in self._lost or word.item() != COMES:
            self._announce(batch, receivers, FAILS)
            raise UnsentError(
                f"rank {batch.reader} did not send its part"
                + (f": {self._lost[sender]}" if sender in self._lost else "")
            )
        self._announce(batch, receivers, COMES)
        pieces = _pieces(memory)
        works = [self._ranks.receive(piece, sender, batch.number) for piece in pieces]
        for work, piece in zip(works, pieces, strict=True):
            self._wait(work, sender)
            self._pass_on(batch, receivers, piece)
        if sender in self._lost:
            raise UnsentError(f"rank {batch.reader} did not send its part: {self._lost[sender]}")

    def finish(self) -> None:
        """Wait until all is sent."""
        self._settle(0)

    def _announce(self, batch: Batch, receivers: Sequence[int], word: int) -> None:
        self._pass_on(batch, receivers, torch.tensor([word], device="cpu"))

    def _pass_on(self, batch: Batch, receivers: Sequence[int], data: torch.Tensor) -> None:
        for rank in receivers:
            if rank not in self._lost:
                try:
                    work = self._ranks.send(data, rank, batch.number)
                except RuntimeError as error:
                    self._lose(rank, error)
                    continue
                self._sent.append((rank, work, data))
                self._under_way_bytes += data.nbytes
        self._settle(UNDER_WAY_BYTES)

    def _settle(self, most_bytes: int) -> None:
        while self._sent and self._under_way_bytes > most_bytes:
            rank, work, data = self._sent.popleft()
            self._under_way_bytes -= data.nbytes
            self._wait(work, rank)

    def _get(self, batch: Batch, sender: int, data: torch.Tensor) -> None:
        if sender not in self._lost:
            try:
                work = self._ranks.receive(data, sender, batch.number)
            except RuntimeError as error:
                self._lose(sender, error)
                return
            self._wait(work, sender)

    def _wait(self, work: dist.Work, rank: int) -> None:
        if rank in self._lost:
            return
        try:
            work.wait(timedelta(seconds=max(self._give_up_at - time.monotonic(), 0.001)))
        except RuntimeError as error:
            self._lose(rank, error)

    def _lose(self, rank: int, error: RuntimeError) -> None:
        self._lost[rank] = f"rank {rank} does not answer rank {self.rank} ({text_of(error, MAX_LINE).splitlines()[0]})"


def _pieces(memory: memoryview | None) -> list[torch.Tensor]:
    if memory is None:
        return []
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES)]
