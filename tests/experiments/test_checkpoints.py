"""Checkpoints come back bit for bit, the last two are kept, and halves are not seen."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.checkpoints import Checkpoints, on_default_device


class State(NamedTuple):
    params: dict
    opt_state: tuple
    step: jax.Array


def make_state(step):
    """A state with every kind of leaf and empty node that optimizers have."""
    params = {
        "kernel": jax.random.normal(jax.random.key(step), (2, 3, 4)),
        "half": jnp.full(5, step, jnp.bfloat16),
    }
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {"adam": optax.adam(1e-3), "none": optax.set_to_zero()}, {"kernel": "adam", "half": "none"}
        ),
    )
    return State(params, optimizer.init(params), jnp.asarray(step))


def abstract():
    return on_default_device(jax.eval_shape(lambda: make_state(0)))


def assert_same(a, b):
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
    chex.assert_trees_all_equal(a, b)


def test_round_trip(tmp_path):
    state = make_state(3)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest_step is None
        checkpoints.save(3, state)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest_step == 3
        restored = checkpoints.restore(abstract())
    assert isinstance(restored, State)
    assert_same(restored, state)
    assert restored.params["kernel"].sharding == state.params["kernel"].sharding


def test_the_last_two_are_kept(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 5, 9):
            checkpoints.save(step, make_state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5", "9"]


def test_a_save_is_not_changed_by_donating_its_buffers(tmp_path):
    update = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = update(jnp.zeros(1_000_000))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"x": x})
        for _ in range(10):
            x = update(x)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(on_default_device({"x": jax.ShapeDtypeStruct(x.shape, x.dtype)}))
    np.testing.assert_array_equal(restored["x"], 1.0)


def test_an_unfinished_save_is_cleared_and_not_restored(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1))
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "1", unfinished)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 1
        assert_same(checkpoints.restore(abstract()), make_state(1))
        checkpoints.save(2, make_state(2))
    assert not unfinished.exists()
    with Checkpoints(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(abstract()), make_state(2))


def test_a_half_deleted_old_checkpoint_is_in_nobodys_way(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step))
    (tmp_path / "1" / "_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(tmp_path / "1" / "default")
    with Checkpoints(tmp_path) as checkpoints:
        assert_same(checkpoints.restore(abstract()), make_state(2))
        checkpoints.save(3, make_state(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "overwritten": lambda content: b"\xff" * len(content),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, damage):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step))
    for path in (folder / "2").rglob("*"):
        if path.is_file():
            path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with Checkpoints(folder) as checkpoints:
        with pytest.warns(UserWarning, match=r"checkpoints/2 cannot be read.*going back to step 1"):
            assert_same(checkpoints.restore(abstract()), make_state(1))
        assert checkpoints.latest_step == 1
        checkpoints.save(2, make_state(2))
    assert (tmp_path / "checkpoints-damaged" / "2").is_dir()
    with Checkpoints(folder) as checkpoints:
        assert_same(checkpoints.restore(abstract()), make_state(2))


def test_where_none_can_be_read_the_latest_says_why(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.zeros(step)})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError):
            checkpoints.restore(abstract())
        assert checkpoints.latest_step == 2


def test_a_full_disk_is_told_and_the_checkpoint_before_is_whole(tmp_path):
    """In a process that may write no file of over a megabyte."""
    program = """
import resource, signal, sys
import jax.numpy as jnp, jax
from experiments.checkpoints import Checkpoints
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
with Checkpoints(__import__("pathlib").Path(sys.argv[1])) as checkpoints:
    checkpoints.save(1, {"x": jnp.zeros(10)})
    checkpoints.save(2, {"x": jax.random.normal(jax.random.key(0), (2**21,))})
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "InputError" in done.stderr and "no space is left for a checkpoint" in done.stderr
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 1
        shape = on_default_device({"x": jax.ShapeDtypeStruct((10,), jnp.float32)})
        np.testing.assert_array_equal(checkpoints.restore(shape)["x"], 0.0)


def test_restoring_from_nothing_is_an_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="no checkpoint in"):
        checkpoints.restore(abstract())


def test_a_step_cannot_be_saved_twice(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1))
        with pytest.raises(ValueError, match="already exists"):
            checkpoints.save(1, make_state(1))
