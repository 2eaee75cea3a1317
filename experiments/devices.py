"""How a run's step is mapped over devices: `pmap`, or a named mesh under `jit`, of one device at the least.

The same run on other devices has the same results but for rounding, and goes on from the same checkpoints, so
devices are no part of a run's configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from experiments.checkpoints import on_default_device
from experiments.config import Run
from experiments.errors import InputError

_DATA, _FSDP = "data", "fsdp"


@dataclass(frozen=True)
class Devices:
    """Which devices a run is trained on, and what each of them holds."""

    how: Literal["one", "pmap", "mesh"] = "one"
    """`one` device; `pmap`: all of them, each with the whole state and its part of the batch; `mesh`: under
    `jit`, each with its part of the batch, and of the state what `fsdp` leaves it."""
    data: int | None = None
    """mesh: groups of devices that hold the whole state; by default as many as there are."""
    fsdp: int = 1
    """mesh: devices in a group, which divide parameters and optimiser state among them."""


ONE = Devices()


class Layout(Protocol):
    """Where a run's arrays lie. States go in and out of `compiled` functions laid out."""

    axis_name: str | None
    """The mapped axis over which the step itself takes the mean of its gradients; None where `jit` does."""

    def compiled(self, train_step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        """(state, tokens) -> (state, numbers), over the devices; the state's buffers are donated."""
        ...

    def initial(self, init: Callable[[], Any]) -> Any:
        """A new state, laid out."""
        ...

    def batch(self, tokens: np.ndarray) -> Array:
        """Sequences (batch, length), divided among the devices."""
        ...

    def whole(self, state: Any) -> Any:
        """One copy of the state, for evaluations and checkpoints."""
        ...

    def abstract(self, state: Any) -> Any:
        """The shapes of one copy, with shardings, for a restore."""
        ...

    def spread(self, state: Any) -> Any:
        """One copy laid out: the inverse of `whole`."""
        ...

    def evaluated(self, batches: np.ndarray, axis: int | None = None) -> Array:
        """Text for evaluations, where `whole` leaves the state; divided along an axis, if one is given."""
        ...

    def read(self, numbers: Any) -> Any:
        """Arrays computed from `whole` states, as NumPy arrays."""
        ...


def layout(devices: Devices, config: Run) -> Layout:
    """The layout of a run.

    Raises:
      InputError: there are too few devices, or the batch cannot be divided among them.
    """
    there, processes = jax.device_count(), jax.process_count()
    data, fsdp = devices.data, devices.fsdp
    if processes > 1 and devices.how != "mesh":
        raise InputError(
            f"devices.how {devices.how} is for one process, and there are {processes}: choose mesh"
        )
    if devices.how == "one":
        data, fsdp = 1, 1
    elif devices.how == "pmap":
        data, fsdp = there, 1
    if fsdp < 1 or (data is not None and data < 1):
        raise InputError(f"devices.data and devices.fsdp must be at least 1, got {data} and {fsdp}")
    data = max(there // fsdp, 1) if data is None else data
    if data * fsdp > there:
        raise InputError(
            f"a mesh of {data} x {fsdp} (devices.data x devices.fsdp) needs {data * fsdp} devices, and there "
            f"are {there}: choose a smaller one"
        )
    if processes > 1 and data * fsdp < there:
        raise InputError(
            f"a mesh of {data} x {fsdp} leaves out some of {there} devices in {processes} processes"
        )
    micro_batch = config.data.batch_size // config.data.accumulation
    if micro_batch % (data * fsdp):
        raise InputError(
            f"{micro_batch} sequences (data.batch_size {config.data.batch_size} over data.accumulation "
            f"{config.data.accumulation}) cannot be divided among {data * fsdp} devices: choose a multiple"
        )
    return Replicas() if devices.how == "pmap" else Mesh(data, fsdp)


class Mesh:
    """A named mesh (data, fsdp) under `jit`: the partitioner divides the work as the arrays lie."""

    axis_name = None

    def __init__(self, data: int, fsdp: int) -> None:
        devices = jax.devices()[: data * fsdp]
        self._fsdp = fsdp
        self._mesh = jax.make_mesh(
            (data, fsdp), (_DATA, _FSDP), axis_types=(AxisType.Auto,) * 2, devices=devices
        )
        self._whole = NamedSharding(self._mesh, PartitionSpec())
        self._gather = jax.jit(lambda numbers: numbers, out_shardings=self._whole)

    def compiled(self, train_step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        def laid_out(state: Any, tokens: Array) -> tuple[Any, Any]:
            state, numbers = train_step(state, tokens)
            return jax.lax.with_sharding_constraint(state, self._shardings(state)), numbers

        return jax.jit(laid_out, donate_argnums=0)

    def initial(self, init: Callable[[], Any]) -> Any:
        return jax.jit(init, out_shardings=self._shardings(jax.eval_shape(init)))()

    def batch(self, tokens: np.ndarray) -> Array:
        return jax.make_array_from_process_local_data(self._divided(0), tokens)

    def whole(self, state: Any) -> Any:
        return state

    def abstract(self, state: Any) -> Any:
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self._shardings(state),
        )

    def spread(self, state: Any) -> Any:
        return state

    def evaluated(self, batches: np.ndarray, axis: int | None = None) -> Array:
        sharding = self._whole if axis is None else self._divided(axis)
        return jax.make_array_from_callback(batches.shape, sharding, lambda index: batches[index])

    def read(self, numbers: Any) -> Any:
        return jax.device_get(self._gather(numbers))

    def _divided(self, axis: int) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*(None,) * axis, (_DATA, _FSDP)))

    def _shardings(self, state: Any) -> Any:
        return jax.tree.map(lambda x: NamedSharding(self._mesh, self._spec(x.shape)), state)

    def _spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Matrices along their longest axis that divides; what is small stays whole."""
        axes = [axis for axis, size in enumerate(shape) if size % self._fsdp == 0]
        if self._fsdp == 1 or len(shape) < 2 or not axes:
            return PartitionSpec()
        longest = max(axes, key=lambda axis: (shape[axis], axis))
        return PartitionSpec(*(None,) * longest, _FSDP)


class Replicas:
    """`pmap` over all devices: a leading axis of copies on the state, and of parts on the batch."""

    axis_name = _DATA

    def compiled(self, train_step: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        mapped = jax.pmap(train_step, axis_name=self.axis_name, donate_argnums=0)

        def step(state: Any, tokens: Array) -> tuple[Any, Any]:
            state, numbers = mapped(state, tokens)
            return state, self.whole(numbers)

        return step

    def initial(self, init: Callable[[], Any]) -> Any:
        return self.spread(jax.jit(init)())

    def batch(self, tokens: np.ndarray) -> Array:
        return tokens.reshape(jax.local_device_count(), -1, tokens.shape[-1])

    def whole(self, state: Any) -> Any:
        return jax.tree.map(lambda x: x.addressable_shards[0].data.reshape(x.shape[1:]), state)

    def abstract(self, state: Any) -> Any:
        return on_default_device(state)

    def spread(self, state: Any) -> Any:
        copy = jax.pmap(lambda _, state: state, axis_name=self.axis_name, in_axes=(0, None))
        return copy(np.arange(jax.local_device_count()), state)

    def evaluated(self, batches: np.ndarray, axis: int | None = None) -> Array:
        return jax.device_put(batches)

    def read(self, numbers: Any) -> Any:
        return jax.device_get(numbers)
