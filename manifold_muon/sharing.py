"""Work on a stack of matrices, shared by devices: each does its own whole matrices, and nothing is summed.

Left to itself, the partitioner splits the matrices and adds up a Gram matrix over the devices in every
iteration of every solver.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

AxisName = str | tuple[str, ...]


def over_devices(
    function: Callable[..., Any], *stacks: Float[Array, "batch ..."], axis_name: AxisName | None = None
) -> Any:
    """`function(*stacks)`, where each device takes an equal share of the stack.

    Args:
      function: of stacks (share, ...), which gives a pytree of stacks of as many members; it must treat the
        members one by one.
      stacks: arrays of one batch size; a batch that does not divide is filled up with repeated members.
      axis_name: a mapped axis of `pmap` or `shard_map` over which the stacks are replicated. Without it, the
        mesh is read from the arrays; no mesh, or one device, means no sharing.

    Returns:
      The function's result, on every device whole.
    """
    batch = len(stacks[0])
    if axis_name is not None:
        return _over_mapped_axis(function, stacks, batch, axis_name)
    mesh = mesh_of(*stacks)
    if mesh is None:
        return function(*stacks)
    if mesh.size > 2 * batch:
        # Filled up, the stack would be more to gather than the sum of one copy's parts is.
        def mapped(*stacks: Array) -> Any:
            return _over_mapped_axis(function, stacks, batch, mesh.axis_names)

        whole = PartitionSpec()
        return jax.shard_map(mapped, mesh=mesh, in_specs=whole, out_specs=whole)(*map(replicated, stacks))
    # One reshard in and one out; in between every product is local. Replicated after the padding too: from
    # leaves that are sharded anyhow, the partitioner would make a chain of permutations.
    shares = PartitionSpec(mesh.axis_names)
    padded = [replicated(_padded(replicated(x), mesh.size)) for x in stacks]
    if _is_explicit(mesh):
        padded = [jax.sharding.reshard(x, NamedSharding(mesh, shares)) for x in padded]
    result = jax.shard_map(function, mesh=mesh, in_specs=shares, out_specs=shares)(*padded)
    return jax.tree.map(lambda x: replicated(x)[:batch], result)


def mesh_of(*arrays: Array) -> AbstractMesh | None:
    """The mesh that the arrays live on, if it has more than one device and is not mapped by hand already."""
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty and mesh.size > 1 and AxisType.Manual not in mesh.axis_types:
            return mesh
    return None


def replicated(x: Array) -> Array:
    """x whole on every device of its mesh."""
    mesh = mesh_of(x)
    if mesh is None:
        return x
    whole = NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim))
    if _is_explicit(mesh):
        return jax.sharding.reshard(x, whole)
    return jax.lax.with_sharding_constraint(x, whole)


def sharded_like(x: Array, other: Array) -> Array:
    """x laid out like another array of its shape, where that is part of its type."""
    mesh = mesh_of(other)
    if mesh is None or not _is_explicit(mesh):
        return x
    return jax.sharding.reshard(x, jax.typeof(other).sharding)


def _is_explicit(mesh: AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _over_mapped_axis(
    function: Callable[..., Any], stacks: tuple[Array, ...], batch: int, axis_name: AxisName
) -> Any:
    share = -(-batch // jax.lax.axis_size(axis_name))
    mine = jax.lax.axis_index(axis_name) * share + jnp.arange(share)
    # Devices without a share of their own repeat others' members: zeros might be singular.
    result = function(*(x[mine % batch] for x in stacks))

    def gather(x: Array) -> Array:
        # As a sum of zeros, since shard_map knows a sum to be equal on all devices, and a gather not.
        whole = jnp.zeros((batch, *x.shape[1:]), x.dtype)
        whole = jax.lax.pcast(whole, axis_name, to="varying").at[mine].set(x, mode="drop")
        return jax.lax.psum(whole, axis_name)

    return jax.tree.map(gather, result)


def _padded(x: Array, devices: int) -> Array:
    """The stack filled up to a multiple of the devices, with members of its own."""
    missing = -len(x) % devices
    return x if missing == 0 else x[np.arange(len(x) + missing) % len(x)]
