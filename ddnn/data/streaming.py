"""Minibatches of a corpus that stays in host memory, read ahead while the device computes.

A thread of the host splices each minibatch, in the dtype of the store, into one of a few pinned buffers and queues its
copy to the device on a stream of its own; the trainer finds it there. Of the four slots one or two are trained on, one
is ready and one is being filled. On a CPU the same thread does the same, and nothing is pinned or copied.

Not yet seen on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from threading import Event

import torch
from torch import Tensor

from ddnn.data.corpus import Corpus
from ddnn.data.transform import InputTransform, splice

SLOTS = 4
BEHIND = 2
"""Minibatches that the device may still work on while the trainer asks for the next one."""


class _Slot:
    """Memory for one minibatch, on the host and on the device. On a CPU both are the same."""

    def __init__(self, minibatch: int, corpus: Corpus, transform: InputTransform, device: torch.device) -> None:
        gpu = device.type == "cuda"
        x, labels = (minibatch, transform.output_dim), (minibatch,)
        self.host_x = torch.empty(x, dtype=corpus.store.dtype, pin_memory=gpu)
        self.host_labels = torch.empty(labels, dtype=corpus.labels.dtype, pin_memory=gpu)
        self.x, self.labels = self.host_x, self.host_labels
        self.copied = self.used = None
        if gpu:
            self.x, self.labels = torch.empty_like(self.x, device=device), torch.empty_like(self.labels, device=device)
            self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]


class Stream:
    """Reads minibatches of `minibatch` frames ahead.

    Args:
        corpus: in host memory.
        device: where the minibatches are wanted.
    """

    def __init__(self, corpus: Corpus, transform: InputTransform, minibatch: int, device: torch.device) -> None:
        self.corpus, self.transform, self.device = corpus, transform, device
        self._slots = [_Slot(minibatch, corpus, transform, device) for _ in range(SLOTS)]
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def over(
        self, order: Iterable[Tensor], lap: Callable[[str], None] = lambda what: None
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Spliced frames (minibatch, output_dim), of the store's dtype and not normalised, and their labels
        (minibatch,) int32, on the device; of the rows (minibatch,) in `order`, one after another. Each pair holds until
        the next is asked for. Closing the iterator ends the thread.

        Args:
            order: is run through by the thread, ahead of the trainer.
            lap: told what the time since its last call went into: `compute` where the trainer waited for the device to
                finish an earlier minibatch, `data` where it waited for the next one.

        Raises:
            whatever reading raised.
        """
        if self.device.type == "cuda":  # an iteration that was left early may have copies under way
            torch.cuda.synchronize(self.device)
        free: SimpleQueue[_Slot | None] = SimpleQueue()
        ready: SimpleQueue[_Slot | None] = SimpleQueue()
        for slot in self._slots:
            free.put(slot)
        in_use: deque[_Slot] = deque()
        closed = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="frames") as reader:
            reading = reader.submit(self._read, order, free, ready, closed)
            try:
                lap("compute")
                while (filled := ready.get()) is not None:
                    if filled.copied is not None:
                        torch.cuda.current_stream(self.device).wait_event(filled.copied)
                    lap("data")
                    yield filled.x, filled.labels
                    if filled.used is not None:
                        filled.used.record(torch.cuda.current_stream(self.device))
                    in_use.append(filled)
                    if len(in_use) > BEHIND:
                        oldest = in_use.popleft()
                        if oldest.used is not None:
                            oldest.used.synchronize()
                        free.put(oldest)
                    lap("compute")
                reading.result()
            finally:
                closed.set()
                free.put(None)

    def _read(
        self,
        order: Iterable[Tensor],
        free: SimpleQueue[_Slot | None],
        ready: SimpleQueue[_Slot | None],
        closed: Event,
    ) -> None:
        """The thread: fills free slots until `order` ends, the iteration is closed, or something goes wrong."""
        on_copies: AbstractContextManager[object] = nullcontext()
        if self._copies is not None:
            on_copies = torch.cuda.stream(self._copies)
        try:
            with on_copies:
                for rows in order:
                    slot = free.get()
                    if slot is None or closed.is_set():
                        return
                    self._fill(slot, rows)
                    ready.put(slot)
        finally:
            ready.put(None)

    def _fill(self, slot: _Slot, rows: Tensor) -> None:
        if rows.shape != slot.host_labels.shape:
            raise ValueError(f"{len(rows)} rows in a minibatch, {len(slot.host_labels)} expected")
        splice(self.corpus, self.transform, rows, slot.host_x)
        torch.index_select(self.corpus.labels, 0, rows, out=slot.host_labels)
        if slot.copied is not None and self._copies is not None:
            slot.x.copy_(slot.host_x, non_blocking=True)
            slot.labels.copy_(slot.host_labels, non_blocking=True)
            slot.copied.record(self._copies)
