"""A run's checkpoints: Orbax, asynchronous, the last two kept."""

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments.errors import InputError
from experiments.hosts import is_first, wait_for_all

KEPT = 2
_DISK_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class Checkpoints:
    """The checkpoints in one folder; a context manager that waits for the last save when it closes.

    A checkpoint counts from the moment it is complete: a kill during a save leaves the earlier ones.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the folder, or creates it, and clears what a killed save left behind.

        Args:
          directory: the folder, used by one process at a time.
        """
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(KEPT),
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._disk_full_explained():
            self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the latest checkpoint, None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Copies a state to the host and starts writing it; returns before it is written.

        Args:
          step: completed updates, more than in any checkpoint so far.
          state: a pytree of arrays; its buffers may be donated as soon as this returns.

        Raises:
          InputError: no space is left.
          Exception: whatever else the previous save met in the background.
        """
        with self._disk_full_explained():
            self._manager.check_for_errors()
            self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def restore(self, abstract_state: Any) -> Any:
        """The latest checkpoint's state.

        One that cannot be read, while an earlier one can, is put aside with a warning: from then on
        `latest_step` is that earlier one's.

        Args:
          abstract_state: what was saved, as `jax.ShapeDtypeStruct`s with shardings (see `on_default_device`).

        Raises:
          ValueError: there is no checkpoint, or the latest has other arrays than `abstract_state`.
          Exception: whatever the storage says of the latest, if none can be read.
        """
        failures: list[tuple[int, Exception]] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                state = self._manager.restore(step, args=ocp.args.StandardRestore(abstract_state))
            except Exception as error:  # Orbax passes on what its storage raises, of many types.
                failures.append((step, error))
                continue
            for damaged, error in failures:
                self._put_aside(damaged, error, step)
            return state
        if failures:
            raise failures[0][1]
        raise ValueError(f"no checkpoint in {self._manager.directory}")

    @contextmanager
    def _disk_full_explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # From C++ it comes as text in a ValueError.
            if not any(text in str(error) for text in _DISK_FULL):
                raise
            raise InputError(
                f"{self._manager.directory}: no space is left for a checkpoint, and those before it are "
                "whole: make room, then start the same command again"
            ) from error

    def _put_aside(self, damaged: int, error: Exception, earlier: int) -> None:
        folder = Path(self._manager.directory)
        source, target = folder / str(damaged), folder.with_name(f"{folder.name}-damaged") / str(damaged)
        if is_first():
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            source.rename(target)
            warnings.warn(
                f"the checkpoint {source} cannot be read, and is put aside as {target}: going back to step "
                f"{earlier} ({type(error).__name__}: {str(error)[:300]})",
                stacklevel=4,
            )
        wait_for_all(f"put aside {damaged}")
        self._manager.reload()


def on_default_device(abstract_state: Any) -> Any:
    """A pytree of shapes and dtypes (from `jax.eval_shape`) with the default device's sharding."""
    sharding = jnp.zeros(()).sharding
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_state)
