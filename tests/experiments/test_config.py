"""Configurations: the presets' figures, and what is refused before anything runs."""

from dataclasses import replace

import pytest

from experiments.config import PRESETS, Data, Model, Optimizer, Run, Sel, differences, preset, to_dict
from experiments.errors import InputError


def test_tiny_is_what_the_study_says() -> None:
    tiny = preset("tiny")
    assert tiny.model == Model(
        vocab_size=256,
        context=128,
        layers=4,
        heads=4,
        width=128,
        bias=False,
        dropout=0.0,
        layer_norm_epsilon=1e-5,
    )
    assert (tiny.steps, tiny.data.batch_size, tiny.eval_every, tiny.data.corpus) == (600, 16, 100, "stdlib")
    assert tiny.data.eval_batches >= 20
    optimizer = tiny.optimizer
    assert (optimizer.warmup_steps, optimizer.muon_learning_rate, optimizer.momentum) == (20, 0.02, 0.95)
    assert (optimizer.solver_iterations, optimizer.solver_step_size, optimizer.msign_steps) == (20, 0.1, 10)
    assert (optimizer.learning_rate, optimizer.learning_rate * optimizer.final_fraction) == (
        6e-4,
        pytest.approx(6e-5),
    )
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert optimizer.clip_norm == 1.0


def test_demo_is_tiny_for_150_steps() -> None:
    assert preset("demo") == replace(preset("tiny"), steps=150)


def test_solvers_bring_their_own_retraction() -> None:
    """The faithful run is the reference's in both, ours is ours in both, and nothing else changes."""
    for run in (preset("tiny"), preset("gpt2-small")):
        faithful, ours = run.with_solver("dual_ascent").optimizer, run.with_solver("gram").optimizer
        assert (faithful.solver, faithful.dgram_retraction) == ("dual_ascent", "svd")
        assert (ours.solver, ours.dgram_retraction, ours.tolerance) == ("gram", "frame", 1e-2)
        assert replace(ours, solver="dual_ascent", dgram_retraction="svd") == faithful
        assert run.with_solver("gram") == replace(run, optimizer=ours)


def test_narrow_is_half_of_tiny() -> None:
    tiny, narrow = preset("tiny"), preset("narrow")
    assert narrow.model == replace(tiny.model, width=64, context=64)
    assert narrow.optimizer == replace(tiny.optimizer, learning_rate=3e-3)
    assert narrow.steps == 150


def test_gpt2_small_is_the_papers() -> None:
    run = preset("gpt2-small")
    assert (run.model.layers, run.model.heads, run.model.width, run.model.context) == (12, 12, 768, 1024)
    assert (run.steps, run.data.batch_size, run.optimizer.warmup_steps) == (50_000, 64, 1000)
    assert run.optimizer.msign_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(width=128, heads=3), "width 128 is not divisible by model.heads 3"),
        (lambda: Model(layers=0), "model.layers must be at least 1"),
        (lambda: Model(context=1), "model.context must be at least 2"),
        (lambda: Model(dropout=1.0), r"model.dropout must be in \[0, 1\)"),
        (
            lambda: Data(batch_size=10, accumulation=3),
            "batch_size 10 is not divisible by data.accumulation 3",
        ),
        (lambda: Data(eval_batches=0), "data.eval_batches must be at least 1"),
        (lambda: Optimizer(warmup_steps=-1), "warmup_steps is negative"),
        (lambda: Optimizer(learning_rate=0.0), "learning_rate must be positive"),
        (lambda: Optimizer(learning_rate=float("inf")), "learning_rate must be positive and finite"),
        (lambda: Optimizer(solver_step_size=-1.0), "solver_step_size must be positive"),
        (lambda: Optimizer(solver_iterations=0), "solver_iterations must be at least 1"),
        (lambda: Optimizer(solver="newton"), "'newton' is none of gram, dual_ascent"),
        (lambda: Optimizer(tolerance=0.0), r"tolerance must be in \(0, 1\), got 0.0"),
        (lambda: Optimizer(tolerance=1.0), r"tolerance must be in \(0, 1\), got 1.0"),
        (lambda: Optimizer(momentum=1.5), r"momentum must be in \[0, 1\)"),
        (lambda: Optimizer(weight_decay=-1.0), "weight_decay is negative"),
        (lambda: Optimizer(final_fraction=-3.0), r"final_fraction must be in \[0, 1\]"),
        (lambda: Data(corpus=""), "data.corpus is empty"),
        (lambda: Run(seed=-1), r"seed must be in \[0, 2\*\*32\)"),
        (lambda: Run(divergence_margin=0.0), "divergence_margin must be positive"),
        (lambda: Run(steps=20), "warmup_steps 20 must be less than steps 20"),
        (lambda: Run(log_every=0), "log_every must be at least 1"),
        (lambda: Sel(curvature=0.0), "sel.curvature must be positive and finite, got 0.0"),
        (lambda: Sel(m_last=-1.0), "sel.m_last must be finite and not negative"),
        (lambda: Run(sel=Sel(on=True)), "'hetero' holds matrices on a manifold.*choose adamw or none"),
        (lambda: Model(base_heads=3), "base_width 128 is not divisible by model.base_heads 3"),
        (lambda: Model(parametrization="spectal"), "'spectal' is none of standard, spectral"),
        (lambda: Model(embedding_std=0.0), "model.embedding_std must be positive and finite"),
        (lambda: Model(output_scale=float("nan")), "model.output_scale must be positive and finite"),
        (
            lambda: Run(model=Model(parametrization="spectral")),
            "'hetero' puts matrices on a manifold.*choose adamw, sgd",
        ),
        (
            lambda: Run(
                model=Model(parametrization="spectral"), optimizer=Optimizer(name="adamw"), sel=Sel(on=True)
            ),
            "both set the initial weights",
        ),
        (lambda: Run(optimizer=Optimizer(name="sgd"), sel=Sel(on=True)), "'sgd' .*choose adamw or none"),
        (lambda: preset("huge"), "unknown preset 'huge': choose one of demo, tiny, narrow, gpt2-small"),
    ],
)
def test_impossible_configurations(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_differences_name_the_fields() -> None:
    assert set(PRESETS) == {"demo", "tiny", "narrow", "gpt2-small"}
    tiny = preset("tiny")
    other = replace(tiny.with_optimizer("stiefel"), model=replace(tiny.model, width=256))
    assert differences(to_dict(tiny), to_dict(tiny)) == []
    assert differences(to_dict(tiny), to_dict(other)) == [
        "model.width: 128 -> 256",
        "optimizer.name: 'hetero' -> 'stiefel'",
    ]
    assert differences({"a": 1}, {}) == ["a: 1 -> None"]
