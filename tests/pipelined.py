"""A loop that fetches batches ahead of the one that it trains, as TorchRec's pipelines do."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torchrec_stream_ckpt import TrackedLoader


def pipelined(
    loader: TrackedLoader[Any],
    ahead: int,
    first_epoch: int,
    epochs: int,
    begin: Callable[[int], object] = lambda epoch: None,
) -> Iterator[Any]:
    """What a pipeline trains that keeps ``ahead`` batches in flight; the loader is told after each one."""
    for epoch in range(first_epoch, epochs):
        begin(epoch)
        source, queue = iter(loader), deque[Any]()
        while True:
            queue.extend(itertools.islice(source, ahead + 1 - len(queue)))
            if not queue:
                break
            batch = queue.popleft()
            loader.trained()
            yield batch
