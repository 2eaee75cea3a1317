"""A run's checkpoints: Orbax, asynchronous, the last two kept."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

KEPT = 2


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
          Exception: whatever the previous save met in the background.
        """
        self._manager.check_for_errors()
        self._manager.save(step, args=ocp.args.StandardSave(state), force=True)

    def restore(self, abstract_state: Any) -> Any:
        """The latest checkpoint's state.

        Args:
          abstract_state: what was saved, as `jax.ShapeDtypeStruct`s with shardings (see `on_default_device`).

        Raises:
          ValueError: there is no checkpoint, or it has other arrays than `abstract_state`.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(f"no checkpoint in {self._manager.directory}")
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract_state))


def on_default_device(abstract_state: Any) -> Any:
    """A pytree of shapes and dtypes (from `jax.eval_shape`) with the default device's sharding."""
    sharding = jnp.zeros(()).sharding
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_state)
