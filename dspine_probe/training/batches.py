"""The micro-batches of every optimiser step, a pure function of (seed, step) and read one step ahead of use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from dspine_probe.errors import UsageError
from dspine_probe.training.anchors import Batch, make_batch, sample_anchors, show_prefixes, visiting_order
from dspine_probe.training.features import FeatureStore
from dspine_probe.training.optimization import TrainConfig


class StepBatches:
    """Micro-batches of each step, read from the memory map one step ahead of use."""

    def __init__(
        self,
        store: FeatureStore,
        indices: list[int] | None,
        config: TrainConfig,
        block_size: int,
        *,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        """Batches of sequences `indices` (default: all) for process `rank` of `processes`."""
        self.store, self.config, self.block_size = store, config, block_size
        self.indices = list(range(len(store))) if indices is None else indices
        self.rank, self.processes = rank, processes
        lengths, prompts = store.meta.lengths, store.meta.prompt_lengths
        self.indices = [i for i in self.indices if lengths[i] - prompts[i] >= 2]
        self.lengths = [lengths[i] for i in self.indices]
        self.per_epoch = len(visiting_order(self.lengths, config.sequences, config.seed, 0))
        if not self.per_epoch:
            raise UsageError(f"{len(self.indices)} usable sequences do not fill one batch of {config.sequences}.")

    def steps(self, first: int, last: int) -> Iterator[tuple[int, list[Batch]]]:
        """Steps first…last − 1 with their micro-batches."""
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self.at, first)
            for step in range(first, last):
                batches, ahead = ahead.result(), pool.submit(self.at, min(step + 1, last - 1))
                yield step, batches

    def numbers(self, step: int) -> range:
        """Which micro-batches of the whole run, over all processes, this one computes at `step`."""
        accumulate = self.config.accumulate
        start = (step * self.processes + self.rank) * accumulate
        return range(start, start + accumulate)

    def at(self, step: int) -> list[Batch]:
        """The micro-batches of `step` on this process."""
        return [self._micro(number) for number in self.numbers(step)]

    def _micro(self, number: int) -> Batch:
        config = self.config
        epoch, place = divmod(number, self.per_epoch)
        order = visiting_order(self.lengths, config.sequences, config.seed, epoch)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        sequences = [self.store[self.indices[i]] for i in order[place]]
        anchors = [sample_anchors(s, config.anchors, generator) for s in sequences]
        batch = make_batch(
            sequences, anchors, block_size=self.block_size, gamma=config.gamma, anchors_per_sequence=config.anchors
        )
        share = config.visible_prefix
        return show_prefixes(batch, share, generator) if share else batch
