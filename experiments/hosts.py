"""Several processes, on one machine or many, that train one run together: the first of them writes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from experiments.errors import InputError

T = TypeVar("T")
_HEARTBEAT = 30
"""Seconds of silence after which a process counts as dead, and the others end with an error."""


@dataclass(frozen=True)
class Hosts:
    """The processes of a run; by default this one alone."""

    automatic: bool = False
    """Ask the cluster: TPU pods, Slurm and the like say all that the others are for."""
    coordinator: str | None = None
    """ADDRESS:PORT of the first process, the same for all."""
    count: int | None = None
    """Processes that there are."""
    index: int | None = None
    """Which one this is, from 0."""


ALONE = Hosts()


def join(hosts: Hosts) -> None:
    """Connects this process with the others, before anything is computed.

    Raises:
      InputError: the settings are incomplete.
    """
    given = (hosts.coordinator, hosts.count, hosts.index)
    if hosts == ALONE:
        return
    if hosts.automatic != (given == (None, None, None)) or (not hosts.automatic and None in given):
        raise InputError(
            "give hosts.coordinator, hosts.count and hosts.index together, or hosts.automatic instead of them"
        )
    # On CPUs; elsewhere it is not looked at.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(*given, heartbeat_timeout_seconds=_HEARTBEAT)


def is_first() -> bool:
    """Whether this is the process that writes."""
    return jax.process_index() == 0


def wait_for_all(what: str) -> None:
    """Returns when all processes are here.

    Args:
      what: a name that is the same in all of them.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def first_then_others(do: Callable[[], T], what: str) -> T:
    """`do()`, in the first process before it is done in the others.

    Args:
      do: what reads what the first has written, say.
      what: a name that is the same in all processes.
    """
    if not is_first():
        wait_for_all(what)
        return do()
    done = do()
    wait_for_all(what)
    return done
