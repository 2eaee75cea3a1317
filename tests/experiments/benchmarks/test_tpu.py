"""The TPU check on eight virtual CPU devices in the place of chips."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.benchmarks import tpu
from experiments.benchmarks.hlo import collectives, parse
from experiments.config import Data, Model, Run
from experiments.errors import InputError

CHIPS = 8
CONFIG = Run(model=Model(layers=2, width=32, heads=2, context=16, remat=True), data=Data(batch_size=16))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((CHIPS,), (tpu.AXIS,), axis_types=(AxisType.Auto,))


@pytest.fixture
def cpus(mesh, monkeypatch):
    """CPU devices as the chips of any topology, and a small model in GPT-2's place."""
    devices = SimpleNamespace(devices=mesh.devices.tolist())
    monkeypatch.setattr(tpu.topologies, "get_topology_desc", lambda topology, platform: devices)
    monkeypatch.setattr(tpu.topologies, "make_mesh", lambda description, shape, names: mesh)
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(tpu, "preset", lambda name: CONFIG)
    monkeypatch.setattr(tpu, "measured_trips", lambda config: [])


def compiled_step(mesh, divided: bool):
    """A data-parallel gradient over two layers, and a loop over its Gram matrices, divided by rows or not."""
    layers = jax.ShapeDtypeStruct((2, 16, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    batch = jax.ShapeDtypeStruct((CHIPS, 16), jnp.float32, sharding=NamedSharding(mesh, P(tpu.AXIS)))

    def loss(layers, x):
        def layer(x, kernel):
            return jnp.tanh(x @ kernel), None

        return jnp.sum(lax.scan(layer, x, layers)[0] ** 2)

    def step(layers, x):
        gradient = jax.grad(loss)(layers, x)
        spec = P(None, tpu.AXIS) if divided else P()
        gradient = lax.with_sharding_constraint(gradient, NamedSharding(mesh, spec))
        return lax.fori_loop(0, 3, lambda _, y: y @ (y.mT @ y), gradient)

    return jax.jit(step).lower(layers, batch).compile()


def test_the_models_own_loops_may_hold_collectives(mesh):
    module = parse(compiled_step(mesh, divided=False).as_text())
    found = collectives(module)
    assert any(c.loops for c in found), "the gradient of each layer is summed in the loop over the layers"
    assert not tpu.in_solvers(module, found)


def test_a_collective_in_another_loop_is_found(mesh):
    module = parse(compiled_step(mesh, divided=True).as_text())
    (bad,) = {c.op_name for c in tpu.in_solvers(module, collectives(module))}
    assert "jvp(" not in bad


@pytest.mark.parametrize(("sequences", "chips", "expected"), [(64, 8, 64), (64, 256, 256)])
def test_every_chip_has_a_sequence(sequences, chips, expected):
    config = tpu.with_batch(replace(CONFIG, data=Data(batch_size=sequences)), chips)
    assert config.data.batch_size == expected


def test_operations_of_a_chip(mesh):
    config = replace(CONFIG, optimizer=replace(CONFIG.optimizer, name="none"))
    state, tokens = tpu.data_parallel(config, mesh)
    assert tokens.shape == (16, 17) and tokens.sharding.spec == P(tpu.AXIS)
    once, again, _ = tpu.count_parts(config, state, CHIPS, 6, [])
    rows, width, vocabulary = 2 * 16, 32, 256
    block = 12 * width**2 + 2 * 16 * width  # its matrices, and attention over 16 tokens
    forward = 2 * rows * 2 * block
    head = 2 * rows * width * vocabulary
    assert once.products == pytest.approx(3 * (forward + head))
    # The products whose results no gradient needs may be left out.
    assert 0.5 * forward < again.products <= forward
    assert (once.bfloat16_passes, again.bfloat16_passes) == (once.products, again.products)


def test_a_report(cpus, capsys):
    tpu.check(("v5e:2x4",), optimizer="adamw")
    out = capsys.readouterr().out
    assert "v5e:2x4, 8 chips: 16 x 16 tokens, adamw" in out
    assert "of 16." in out and "| all-reduce |" in out and "forward again" in out
    assert "FAILURE" not in out


def test_a_step_that_does_not_fit(cpus, capsys, monkeypatch):
    monkeypatch.setitem(tpu.HBM, "v5e", 1000)
    with pytest.raises(SystemExit) as exit:
        tpu.check(("v5e:2x4",), optimizer="adamw")
    assert exit.value.code == 1
    assert "FAILURE: v5e:2x4" in capsys.readouterr().out


def test_bad_input(cpus, monkeypatch):
    with pytest.raises(InputError, match="v9z"):
        tpu.check(("v9z:2x4",), optimizer="adamw")
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="make tpu-check"):
        tpu.check()
