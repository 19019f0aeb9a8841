"""The tokens that the ranks of a job read."""

from __future__ import annotations

from titan_ckpt.trainer.data.batches import BatchShape, Dataset


def rows_of(dataset: Dataset, ranks: int, start: int, stop: int) -> list[list[int]]:
    """Samples `start` to `stop` in the order of the job, which reads four at a time on `ranks` ranks."""
    rows = []
    for position in range(start, stop, 4):
        for rank in range(ranks):
            shape = BatchShape(global_batch_size=4, microbatch_size=1, data_rank=rank, data_degree=ranks)
            rows += [each["tokens"][0].tolist() for each in dataset.batch(position, shape).microbatches]
    return rows
