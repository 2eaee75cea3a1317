"""SIGTERM, by which schedulers announce that they take a machine away: save and go, to be taken up again."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils

EXIT_CODE = 75
"""Of a process that has saved and gone: EX_TEMPFAIL of sysexits.h, start it again."""


class Preempted(Exception):
    """The run was asked to go, has saved what it has, and goes on when it is started again."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"told to stop by SIGTERM: saved after update {step}, the same command goes on from there"
        )
        self.step = step


@contextmanager
def notice() -> Iterator[Callable[[int], bool]]:
    """While it is open, SIGTERM does not end the process.

    The function that it gives says of an update, by its number, whether the run is to stop after it. Several
    processes stop after the same one, though they are told at different times.

    Handlers belong to the main thread: in another one, nothing changes and nothing is noticed.
    """
    if jax.process_count() > 1:
        # JAX has a handler of its own there, and agrees on the update.
        yield multihost_utils.reached_preemption_sync_point
        return
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return

    def handler(signal_number: int, frame: FrameType | None) -> None:
        came.set()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
