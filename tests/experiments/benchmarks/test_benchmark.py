"""The benchmark's parts on a minute model: what is timed, counted and judged."""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import bench, devices, share, torch_muon, widths
from experiments.benchmarks.costs import ACCELERATOR, HERE, Position, inner_trips, measured_step, step_flops
from experiments.benchmarks.hlo import parse
from experiments.benchmarks.hlo_flops import product_flops
from experiments.benchmarks.optimizers import (
    HETERO,
    MOMENTUM,
    REFERENCE,
    adamw,
    iterations,
    optax_muon,
    ours,
)
from experiments.benchmarks.quality import judge, upper_bound
from experiments.benchmarks.race import JaxRacer, race
from experiments.benchmarks.rows import Row, format_rows, full_row, timed_row
from experiments.benchmarks.trips import Measured
from experiments.benchmarks.workload import Workload
from experiments.config import Data, Model, Optimizer, Run
from manifold_muon import DGram, Oblique, Stiefel, Unconstrained
from tests.manifold_muon import tangent_oracle
from tests.manifold_muon.tangent_problems import gradient, random_point

MINUTE = Workload(
    "minute",
    Model(vocab_size=256, context=16, layers=2, heads=2, width=16),
    batch_size=2,
    length=8,
    warm_steps=1,
    timed_steps=2,
    seconds=60,
    judged_layers=(0,),
)
MATRICES = {f"h/{name}/kernel" for name in ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")}


@pytest.fixture(scope="module")
def racers() -> dict[str, JaxRacer]:
    """Three optimisers after their steps; what the race said is in `said`."""
    params = MINUTE.initial_params()
    started = [JaxRacer(contender, params) for contender in (adamw(), optax_muon(), ours(HETERO, HETERO))]
    said = list(race(started, MINUTE))
    names = [racer.name for racer in started]
    assert [(name, step) for name, step, _ in said] == [(name, step) for step in (-1, 0, 1) for name in names]
    assert all((seconds is None) == (step < 0) for _, step, seconds in said)
    assert all(seconds is None or seconds > 0 for _, _, seconds in said)
    return {racer.name: racer for racer in started}


def position(racer: JaxRacer) -> Position:
    tokens = next(MINUTE.batches())
    return Position(racer.params, racer.state, MINUTE.gradient(racer.params, tokens))


@pytest.fixture(scope="module")
def on_accelerator(racers: dict[str, JaxRacer]) -> dict[str, Measured]:
    """Name -> what data decides in the next step."""
    return {
        name: measured_step(racer.contender, position(racer), ACCELERATOR) for name, racer in racers.items()
    }


@pytest.fixture(scope="module")
def rows(racers: dict[str, JaxRacer], on_accelerator: dict[str, Measured]) -> dict[str, Row]:
    """Name -> row, with times that are made up."""
    return {
        name: full_row(
            timed_row(racer, [2.0, 4.0], [1.0, 2.0, 90.0]),  # the reference went on alone
            racer,
            position(racer).gradient,
            MINUTE.judged_layers,
            on_accelerator[name],
        )
        for name, racer in racers.items()
    }


def test_each_racer_trains_its_own_parameters(racers: dict[str, JaxRacer]) -> None:
    initial = jax.tree.leaves(MINUTE.initial_params())
    for racer in racers.values():
        assert not all(map(np.array_equal, initial, jax.tree.leaves(racer.params)))
    hetero = racers[HETERO]
    assert len(hetero.iterations) == MINUTE.timed_steps
    assert all(made.keys() == MATRICES for made in hetero.iterations)
    assert not hetero.iterations[0]["h/attn/c_proj/kernel"].any()  # a square Stiefel matrix: closed form
    assert iterations(racers[REFERENCE].state) == {}


def test_an_optimiser_out_of_time_is_left_out() -> None:
    slow, fast = (JaxRacer(adamw(), MINUTE.initial_params()) for _ in range(2))
    slow.name, step = "slow", slow.step
    slow.step = lambda gradient: step(gradient) + 100
    taken = [name for name, step, _ in race([slow, fast], MINUTE) if step >= 0]
    assert taken == ["slow", "AdamW", "AdamW"]


def test_directions_are_those_of_the_next_step(racers: dict[str, JaxRacer]) -> None:
    """Without retraction or decay, a step is the rate times the direction."""
    racer = racers[REFERENCE]
    before = position(racer)
    found = racer.contender.directions(before.gradient, before.state, before.params)
    after, _ = racer.contender.step(before.params, before.state, before.gradient)
    kernel = ("h", "mlp", "c_fc", "kernel")
    moved = np.asarray(_leaf(after, kernel) - _leaf(before.params, kernel))
    # Scaled by sqrt(fan_out / fan_in), which is 2 here.
    np.testing.assert_allclose(moved, -0.02 * 2 * found.a["h/mlp/c_fc/kernel"], atol=2e-7)
    g = np.asarray(found.g["h/mlp/c_fc/kernel"], np.float64)[0]
    a = np.asarray(found.a["h/mlp/c_fc/kernel"], np.float64)[0]
    assert np.sum(g * a) > 0.6 * np.linalg.norm(g, "nuc")

    racer = racers[HETERO]
    before = position(racer)
    found = racer.contender.directions(before.gradient, before.state, before.params)
    assert found.a.keys() == found.g.keys() == MATRICES
    after, state = racer.contender.step(before.params, before.state, before.gradient)
    moved = np.asarray(_leaf(after, kernel) - _leaf(before.params, kernel))
    np.testing.assert_allclose(moved, -0.02 * found.a["h/mlp/c_fc/kernel"], atol=2e-3)
    (muon,) = (x for x in jax.tree.leaves(state, is_leaf=_is_muon) if _is_muon(x))
    g = _leaf(before.gradient, kernel) + MOMENTUM * _leaf(muon.mu, kernel)
    np.testing.assert_allclose(found.g["h/mlp/c_fc/kernel"], g, rtol=1e-5)


def _leaf(tree: dict, path: tuple[str, ...]) -> jax.Array:
    for key in path:
        tree = tree[key]
    return tree


def _is_muon(x: object) -> bool:
    return type(x).__name__ == "ManifoldMuonState"


@pytest.mark.parametrize(
    ("manifold", "name", "shape"),
    [
        (Stiefel(), "stiefel", (24, 8)),
        (Stiefel(), "stiefel", (8, 8)),
        (DGram(), "dgram", (24, 8)),
        (Oblique(), "oblique", (24, 8)),
    ],
)
def test_directions_are_judged_by_the_oracle(manifold: object, name: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    w = random_point(rng, name, *shape)
    g = 1e-3 * gradient(rng, "i^-1", w)
    best = tangent_oracle.solve(g, w, name)
    bound = upper_bound(g, w, manifold)
    assert best.lower <= bound * (1 + 1e-6) and bound <= 1.01 * best.upper
    judged = judge(g, best.direction, w, manifold)
    assert 0.99 <= judged.achieved <= 1 and judged.tangency < 1e-7
    # Off the tangent space by 2 W L, L = P(L), it is worth the same, and the tangency says how far.
    mask = tangent_oracle.constrained_entries(name, shape[1])
    off = best.direction + 0.1 * w @ mask
    judged = judge(g, off, w, manifold)
    assert judged.achieved == pytest.approx(best.lower / bound) and judged.tangency > 1e-3
    # Too long a direction is scaled back.
    assert judge(g, 3 * best.direction, w, manifold).achieved <= judged.achieved * (1 + 1e-9)


def test_without_constraint_the_bound_is_the_nuclear_norm() -> None:
    g = np.random.default_rng(0).normal(size=(9, 5))
    assert upper_bound(g, g, Unconstrained()) == pytest.approx(np.linalg.norm(g, "nuc"))
    assert judge(g, np.eye(9, 5), g, Unconstrained()).tangency == 0


def test_rows_hold_what_can_be_measured(rows: dict[str, Row]) -> None:
    plain, reference, hetero = rows.values()
    assert plain.ratio == 2 and plain.here.products == 0
    assert plain.achieved is plain.tangency is plain.iterations is None
    # Five Newton-Schulz steps on matrices n x n, 3n x n and twice 4n x n in two layers.
    n = MINUTE.model.width
    assert reference.here.products == 2 * 5 * (2 * 4 + 4 * (1 + 3 + 4 + 4)) * n**3
    assert reference.here.bfloat16_passes == reference.here.products
    assert reference.violation == 0 and 0.6 < reference.achieved < 1
    assert hetero.here.decompositions.keys() == {"eigh"}
    assert not hetero.accelerator.decompositions
    assert hetero.accelerator.bfloat16_passes == 6 * hetero.accelerator.products > 0
    assert hetero.violation < 1e-5 and hetero.tangency < 1e-3 and hetero.temporaries > 0
    assert 0 < hetero.iterations.median <= hetero.iterations.median_of_stacks <= hetero.iterations.most
    text = format_rows(list(rows.values()))
    assert text.count("\n") == 4 and "| AdamW | 3 | 2.00 |" in text


def test_costs_follow_the_iterations(
    racers: dict[str, JaxRacer], on_accelerator: dict[str, Measured]
) -> None:
    racer, measured = racers[HETERO], on_accelerator[HETERO]
    arguments = racer.contender, racer.params, ACCELERATOR, measured
    flops = [step_flops(*arguments, iterations).products for iterations in (0, 1, 3)]
    assert flops[2] - flops[1] == pytest.approx(2 * (flops[1] - flops[0])) and flops[1] > flops[0]
    assert 1 <= inner_trips(*arguments) <= 8
    assert inner_trips(adamw(), racer.params, HERE, Measured((), ())) == 0


def test_model_flops_by_hand() -> None:
    layers, d, t, b, vocabulary = 3, 8, 16, 4, 32
    model = Model(vocab_size=vocabulary, context=t, layers=layers, heads=2, width=d, remat=True)
    config = Run(model, Data(batch_size=b), Optimizer(warmup_steps=0))
    forward = 2 * b * t * (12 * layers * d * d + vocabulary * d) + layers * 2 * 2 * b * t * t * d
    assert share.model_flops(config).products == 3 * forward


def test_share_and_its_parts(racers: dict[str, JaxRacer], on_accelerator: dict[str, Measured]) -> None:
    racer, measured = racers[HETERO], on_accelerator[HETERO]
    config = Run(MINUTE.model, Data(batch_size=4), Optimizer(warmup_steps=0))
    found = share.share(config, racer.contender, measured, iterations=3)
    assert found.products == found.optimizer.products / found.model.products
    parts = found.parts()
    assert sum(parts.values()) == pytest.approx(1)
    assert {share.PARTS[name] for name in ("gram", "evaluate", "step", "direction")} <= parts.keys()
    more = share.share(config, racer.contender, measured, iterations=6)
    assert more.optimizer.products > found.optimizer.products and more.model == found.model


def test_products_of_a_compiled_program() -> None:
    def function(x: jax.Array) -> jax.Array:
        def until(c: jax.Array) -> jax.Array:
            return jax.lax.while_loop(
                lambda c: jnp.sum(c) < 1, lambda c: jax.lax.fori_loop(0, 3, twice, c), c
            )

        def twice(_: int, c: jax.Array) -> jax.Array:
            return jnp.matmul(c, jnp.matmul(c, c, precision="highest"), precision="highest")

        return until(jax.lax.fori_loop(0, 5, twice, x)) @ x[:, :, :3]

    x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
    module = parse(jax.jit(function).lower(x).compile().as_text())
    square, thin = 2 * 2 * 8**3, 2 * 2 * 8 * 8 * 3
    for trips in (0, 4):
        found = product_flops(module, partial([trips, np.nan].__getitem__))
        assert found == (5 * 2 + trips * 3 * 2) * square + thin


@pytest.mark.slow
def test_devices_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(MINUTE.model, layers=8)
    monkeypatch.setitem(devices.PRESETS, "minute", replace(devices.PRESETS["tiny"], model=model))
    one, four = (devices.device_row("minute", count, 4, 2) for count in (1, 4))
    assert one.collectives == 0 and four.collectives > 0 and four.collective_bytes > 0
    assert one.traced / four.traced == pytest.approx(4)
    assert one.compiled / four.compiled == pytest.approx(4)
    assert one.collectives_in_loops == four.collectives_in_loops == 0
    assert "1/4.00" in devices.format_device_rows([one, four])


@pytest.mark.slow
def test_widths(on_accelerator: dict[str, Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "measured_step", lambda contender, *_: on_accelerator[contender.name])
    (row,) = widths.width_rows([replace(MINUTE, timed_steps=1)])
    assert row.width == 16 and row.seconds > 0 and row.ratio > 0
    assert row.passes_ratio == pytest.approx(6 * row.products_ratio)
    assert widths.format_width_rows([row]).count("\n") == 2


def test_optimisers_are_compared_and_the_missing_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "contenders", lambda: [adamw(), optax_muon()])
    monkeypatch.setattr(bench, "find_torch", lambda: None)
    measured: dict[str, Measured] = {}
    found = bench.compare(MINUTE, measured)
    assert [row.name for row in found] == list(measured) == ["AdamW", REFERENCE]
    assert [len(row.seconds) for row in found] == [2, 2] and found[1].ratio == 1
    said = capsys.readouterr().out
    assert f"minute, step 1, {REFERENCE}: " in said and "torch.optim.Muon is not compared" in said


def test_the_bench_keeps_every_number(
    tmp_path: Path,
    rows: dict[str, Row],
    on_accelerator: dict[str, Measured],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All its parts in turn, the slow ones replaced by what they would give."""

    def compare(workload: Workload, measured: dict[str, Measured]) -> list[Row]:
        measured.update(on_accelerator)
        return list(rows.values())

    row = devices.DeviceRow(1, 2.0, 3.0, 0, 0, 0)
    monkeypatch.setattr(bench, "compare", compare)
    monkeypatch.setattr(bench, "device_rows", lambda *_: iter([row]))
    monkeypatch.setattr(bench, "WIDTHS", ())
    monkeypatch.setattr(bench, "TINY", MINUTE)
    path = bench.run_bench(tmp_path / "bench", [MINUTE, replace(MINUTE, name="other")])
    kept = json.loads(path.read_text())
    assert kept.keys() == {"environment", "minute", "other", "share", "widths", "devices"}
    assert [row["name"] for row in kept["minute"]] == ["AdamW", REFERENCE, HETERO]
    assert kept["share"][0]["iterations"] == rows[HETERO].iterations.median
    assert kept["share"][0]["optimizer"]["products"] > 0
    assert kept["devices"] == [asdict(row)]
    assert "relative to forward and backward" in capsys.readouterr().out


@pytest.mark.peers
def test_torch_takes_optax_steps() -> None:
    """AdamW's parameters move alike; Muon's too, up to bfloat16 and a scale."""
    torch = torch_muon.find_torch()
    if torch is None:
        pytest.skip("this torch has no Muon")
    params = MINUTE.initial_params()
    racer = torch_muon.TorchRacer(torch, params)
    jax.tree.map(np.testing.assert_array_equal, racer.params, params)
    # optax's Muon gives the rest of the parameters to a Nesterov AdamW, torch's leaves them to the plain one.
    muon, adam = JaxRacer(optax_muon(), params), JaxRacer(adamw(), params)
    gradient = MINUTE.gradient(params, next(MINUTE.batches()))
    for each in (racer, muon, adam):
        assert each.step(gradient) > 0
    ln, kernel = ("ln_f", "scale"), ("h", "mlp", "c_fc", "kernel")
    np.testing.assert_allclose(_leaf(racer.params, ln), _leaf(adam.params, ln), atol=1e-6)
    moved = [np.ravel(_leaf(each.params, kernel) - _leaf(params, kernel)) for each in (racer, muon)]
    assert np.dot(*moved) > 0.98 * np.linalg.norm(moved[0]) * np.linalg.norm(moved[1])
