"""`torch.optim.Muon` on the same parameters, where torch is there and has it (2.9 or newer)."""

import os
import time
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.optimizers import ADAM_RATE, DECAY, MOMENTUM, MUON_RATE
from manifold_muon import assign, named_assignment
from spectral.paths import map_named, named_leaves

NAME = "torch.optim.Muon"


def find_torch() -> ModuleType | None:
    """torch, if it is installed and has a Muon."""
    try:
        import torch
    except ImportError:
        return None
    return torch if hasattr(torch.optim, "Muon") else None


class TorchRacer:
    """Muon for each layer's matrices, in torch's layout (out, in), and AdamW for the rest.

    Its Newton-Schulz iteration runs in bfloat16, which is how it comes; a CPU may be slow at that.
    """

    name = NAME

    def __init__(self, torch: ModuleType, params: Any) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._matrices = frozenset(assign(params, named_assignment("none")))
        self._shapes = jax.eval_shape(lambda x: x, params)
        self._tensors = {
            name: [torch.nn.Parameter(tensor) for tensor in self._split(name, leaf)]
            for name, leaf in named_leaves(params)
        }
        groups = {
            chosen: [
                t for name, ts in self._tensors.items() if (name in self._matrices) is chosen for t in ts
            ]
            for chosen in (True, False)
        }
        self._optimizers = (
            torch.optim.Muon(groups[True], lr=MUON_RATE, momentum=MOMENTUM, weight_decay=0.0),
            torch.optim.AdamW(groups[False], lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=DECAY),
        )

    def _split(self, name: str, leaf: Any) -> list[Any]:
        """One tensor a layer of a stack of matrices; of other leaves, one."""
        array = np.array(leaf)
        parts = [layer.T for layer in array] if name in self._matrices else [array]
        return [self._torch.from_numpy(np.ascontiguousarray(part)) for part in parts]

    @property
    def params(self) -> Any:
        """In JAX's layout."""

        def join(name: str, _: Any) -> jax.Array:
            arrays = [tensor.detach().numpy() for tensor in self._tensors[name]]
            return jnp.asarray(np.stack([x.T for x in arrays]) if name in self._matrices else arrays[0])

        return map_named(join, self._shapes)

    def step(self, gradient: Any) -> float:
        for name, leaf in named_leaves(gradient):
            for tensor, part in zip(self._tensors[name], self._split(name, leaf), strict=True):
                tensor.grad = part
        start = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.step()
        return time.perf_counter() - start
