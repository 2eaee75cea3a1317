"""Typed configuration of a run, its presets, and the checks that need no array."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from experiments.errors import InputError
from sel_jax import CURVATURE

ADAMW, SGD = "adamw", "sgd"
MATRICES = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
"""The blocks' matrices, which Muon trains."""
Status = Literal["finished", "diverged", "non-finite"]
"""How a run can end."""
Solver = Literal["gram", "dual_ascent"]
"""Of the tangent step: ours, or the paper's."""
SOLVERS: tuple[Solver, ...] = get_args(Solver)


Parametrization = Literal["standard", "spectral"]
PARAMETRIZATIONS: tuple[Parametrization, ...] = get_args(Parametrization)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@dataclass(frozen=True)
class Model:
    """GPT-2's shape."""

    vocab_size: int = 256
    """Tokens that there are; text is read as bytes, which needs 256."""
    context: int = 128
    """Tokens per sequence."""
    layers: int = 4
    heads: int = 4
    width: int = 128
    """Features of the residual stream, shared evenly among the heads."""
    bias: bool = False
    """Biases in the linear layers and layer norms."""
    dropout: float = 0.0
    """Share of the features dropped after the embedding and after each branch."""
    tied: bool = True
    """Share the token embedding with the output head."""
    gelu: Literal["exact", "tanh"] = "exact"
    """By the error function, or its approximation by tanh, as in the original GPT-2."""
    layer_norm_epsilon: float = 1e-5
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of activations and products; parameters stay float32."""
    remat: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""
    parametrization: Parametrization = "standard"
    """GPT-2's own initial weights and rates, or those with the same best rates at every width."""
    base_width: int = 128
    """spectral: the width at which learning rates are tuned, and where they are what is typed."""
    base_heads: int = 4
    """spectral: heads at that width; the width grows their number, their size, or both."""
    embedding_std: float = 0.1
    """spectral: of the embeddings' initial entries, at every width."""
    output_scale: float = 1.0
    """spectral, tied: factor on the logits, which fall as 1 / width from the base on."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "heads", "width", "base_width", "base_heads"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1, got {getattr(self, name)}")
        # Over a single token there is no attention to train, nor to probe.
        _require(self.context >= 2, f"model.context must be at least 2, got {self.context}")
        _require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not divisible by model.heads {self.heads}: "
            "choose heads so that every head has the same whole number of features",
        )
        _require(
            self.base_width % self.base_heads == 0,
            f"model.base_width {self.base_width} is not divisible by model.base_heads {self.base_heads}",
        )
        _require(0 <= self.dropout < 1, f"model.dropout must be in [0, 1), got {self.dropout}")
        for name in ("embedding_std", "output_scale"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"model.{name} must be positive and finite, got {value}")

        _require(
            self.parametrization in PARAMETRIZATIONS,
            f"model.parametrization: {self.parametrization!r} is none of {', '.join(PARAMETRIZATIONS)}",
        )

    @property
    def spectral(self) -> bool:
        """Whether sizes and rates follow the spectral parametrisation."""
        return self.parametrization == "spectral"

    @property
    def base(self) -> "Model":
        """The same model at the width where rates are tuned."""
        return replace(self, width=self.base_width, heads=self.base_heads)


@dataclass(frozen=True)
class Data:
    """Which text, and how much of it per update."""

    corpus: str = "stdlib"
    """`stdlib` (the running Python's own source), a text file, a folder of text files, a `.bin` of
    uint16 tokens, or a folder with nanoGPT's `train.bin` and `val.bin`."""
    batch_size: int = 16
    """Sequences per update, over all devices and accumulation steps."""
    accumulation: int = 1
    """Micro-batches whose gradients are averaged into one update."""
    eval_batches: int = 20
    """Fixed batches of held-out text in an evaluation (all there are, if fewer)."""
    probe_sequences: int = 4
    """Held-out sequences on which attention is probed at every evaluation."""

    def __post_init__(self) -> None:
        _require(bool(self.corpus), "data.corpus is empty: name a text, or stdlib")
        for name in ("batch_size", "accumulation", "eval_batches", "probe_sequences"):
            _require(getattr(self, name) >= 1, f"data.{name} must be at least 1, got {getattr(self, name)}")
        _require(
            self.batch_size % self.accumulation == 0,
            f"data.batch_size {self.batch_size} is not divisible by data.accumulation {self.accumulation}",
        )


@dataclass(frozen=True)
class Optimizer:
    """AdamW or SGD for everything, or Manifold Muon on the blocks' matrices with AdamW for the rest."""

    name: str = "hetero"
    """`adamw`, `sgd`, or an assignment of manifolds: none, stiefel, dgram, oblique, hetero, hetero-inv."""
    learning_rate: float = 6e-4
    """AdamW's or SGD's peak rate."""
    final_fraction: float = 0.1
    """Every rate ends its cosine at this fraction of its peak."""
    warmup_steps: int = 20
    """Steps in which every rate rises linearly to its peak."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.1
    """Decoupled; on arrays with two or more axes (a stack axis not counted), not on constrained ones."""
    clip_norm: float = 1.0
    """Largest global norm of a gradient."""
    skips: int = 0
    """Updates in a row that are left out, as their gradient is not finite, before the run ends for it."""
    muon_learning_rate: float = 0.02
    """Muon's peak rate: the spectral norm of its largest step."""
    momentum: float = 0.95
    """Muon's and SGD's, in the Nesterov form."""
    solver: Solver = "gram"
    """Of the tangent step: `gram` is ours, `dual_ascent` the paper's."""
    tolerance: float = 1e-2
    """Relative duality gap at which `gram` stops."""
    solver_iterations: int = 20
    """Matrix signs in a dual ascent."""
    solver_step_size: float = 0.1
    """First step size of the dual ascent; it falls linearly."""
    dgram_retraction: Literal["frame", "svd"] = "frame"
    """How DGram weights return to their manifold: `frame` is ours, `svd` the reference's way."""
    msign_steps: int = 10
    """Polar Express steps in a matrix sign."""
    msign_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the matrix signs' products; the paper's is bfloat16."""

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "skips"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} is negative: {getattr(self, name)}")
        for name in ("learning_rate", "muon_learning_rate", "clip_norm", "solver_step_size"):
            value = getattr(self, name)
            _require(0 < value < math.inf, f"optimizer.{name} must be positive and finite, got {value}")
        for name in ("adam_beta1", "adam_beta2", "momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimizer.{name} must be in [0, 1), got {value}")
        for name in ("solver_iterations", "msign_steps"):
            value = getattr(self, name)
            _require(value >= 1, f"optimizer.{name} must be at least 1, got {value}")
        _require(self.solver in SOLVERS, f"optimizer.solver: {self.solver!r} is none of {', '.join(SOLVERS)}")
        _require(0 < self.tolerance < 1, f"optimizer.tolerance must be in (0, 1), got {self.tolerance}")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay is negative: {self.weight_decay}")
        _require(
            0 <= self.final_fraction <= 1,
            f"optimizer.final_fraction must be in [0, 1], got {self.final_fraction}",
        )


@dataclass(frozen=True)
class Sel:
    """SymExpLin on the blocks' matrices: they are trained as raw weights, which the model sees curved."""

    on: bool = False
    """Under AdamW or unconstrained Muon; off, the matrices are ordinary."""
    curvature: float = CURVATURE
    """beta of a matrix is this over the standard deviation of its initial entries, and at least 1.5."""
    start: Literal["mismatched", "congruent"] = "mismatched"
    """Initial raw weights by inverting the congruent rule, which makes negative weights smaller than drawn,
    or the rule that the model uses itself, so that all weights are as drawn."""
    linear: bool = True
    """Have the linear path."""
    learnable: bool = True
    """Train the scales; off, they are constants."""
    annealed: bool = True
    """Let the rates of the scales e and m move as below; off, they are AdamW's throughout."""
    e_first: float = 1.0
    """First and last multiplier of the rate of the output scale e, with half a cosine between them."""
    e_last: float = 0.1
    m_first: float = 0.1
    """The same of the exponent's scale m."""
    m_last: float = 1.0

    def __post_init__(self) -> None:
        _require(
            0 < self.curvature < math.inf,
            f"sel.curvature must be positive and finite, got {self.curvature}",
        )
        for name in ("e_first", "e_last", "m_first", "m_last"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"sel.{name} must be finite and not negative, got {value}")


@dataclass(frozen=True)
class Run:
    """One training run, whole: equal configurations give equal parameters."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    sel: Sel = field(default_factory=Sel)
    steps: int = 600
    """Updates."""
    eval_every: int = 100
    """Steps between evaluations; there is one before the first step and one after the last too."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between two reads of the loss from the device; every step's loss is recorded all the same."""
    alignment: bool = False
    """Record at every evaluation how the inputs of the MLPs' second matrices lie to them, by their SVDs."""
    divergence_margin: float = 1.0
    """A validation loss this far (nats) above the run's best ends the run as diverged."""
    seed: int = 0
    """Of initialisation, batches and dropout."""

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every", "checkpoint_every", "log_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _require(0 <= self.seed < 2**32, f"seed must be in [0, 2**32), got {self.seed}")
        _require(
            self.divergence_margin > 0, f"divergence_margin must be positive, got {self.divergence_margin}"
        )
        _require(
            self.optimizer.warmup_steps < self.steps,
            f"optimizer.warmup_steps {self.optimizer.warmup_steps} must be less than steps {self.steps}",
        )
        self._check_combination()

    def _check_combination(self) -> None:
        name = self.optimizer.name
        if self.sel.on:
            _require(
                name in (ADAMW, "none"),
                f"optimizer.name {name!r} holds matrices on a manifold, which raw weights do not have, or is "
                f"not one that SEL is trained by: with sel.on choose {ADAMW} or none",
            )
            _require(
                not self.model.spectral,
                "sel.on and model.parametrization spectral both set the initial weights: choose one of them",
            )
        if self.model.spectral:
            _require(
                name in (ADAMW, SGD, "none"),
                f"optimizer.name {name!r} puts matrices on a manifold, whatever their width: with "
                f"model.parametrization spectral choose {ADAMW}, {SGD} or none",
            )

    def with_optimizer(self, name: str) -> "Run":
        """The same run under another optimizer."""
        return replace(self, optimizer=replace(self.optimizer, name=name))

    def with_solver(self, solver: Solver) -> "Run":
        """The same run with our solver and DGram retraction, or faithfully with both of the reference's."""
        retraction = "svd" if solver == "dual_ascent" else "frame"
        return replace(self, optimizer=replace(self.optimizer, solver=solver, dgram_retraction=retraction))


TINY = Run()

PRESETS: dict[str, Run] = {
    "demo": replace(TINY, steps=150),
    "tiny": TINY,
    # For the frontier's 70 to 90 runs in an hour on two cores. AdamW's rate is raised so that 150 steps learn
    # well below the entropy of single bytes, or a rate that spoils learning would not show.
    "narrow": Run(
        model=Model(width=64, context=64),
        data=Data(eval_batches=10),
        optimizer=Optimizer(learning_rate=3e-3),
        steps=150,
        eval_every=15,
        checkpoint_every=150,
    ),
    # The paper's setting whole: GPT-2 small on OpenWebText, 50k steps of 64 x 1024 tokens.
    "gpt2-small": Run(
        model=Model(
            vocab_size=50304,
            context=1024,
            layers=12,
            heads=12,
            width=768,
            compute_dtype="bfloat16",
            remat=True,
        ),
        data=Data(corpus="data/openwebtext", batch_size=64, accumulation=1, eval_batches=100),
        optimizer=Optimizer(warmup_steps=1000, msign_dtype="bfloat16"),
        steps=50_000,
        eval_every=1000,
        checkpoint_every=1000,
    ),
}


def preset(name: str) -> Run:
    """The named preset.

    Raises:
      InputError: no preset has this name.
    """
    _require(name in PRESETS, f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def changes(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value in a, value in b) of every field in which two nested dicts differ."""
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from changes(left, right, f"{prefix}{key}.")
        elif left != right:
            yield f"{prefix}{key}", left, right


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Lines `field: a -> b` for every field in which two configurations (as dicts) differ."""
    return [f"{name}: {left!r} -> {right!r}" for name, left, right in changes(a, b)]


def to_dict(config: Run) -> dict[str, Any]:
    """The configuration as nested dicts of JSON values."""
    return asdict(config)


def from_dict(fields: dict[str, Any]) -> Run:
    """The configuration that `to_dict` gave.

    Raises:
      InputError: there are fields that this version does not know, or a value that it does not accept.
    """
    parts = {"model": Model, "data": Data, "optimizer": Optimizer, "sel": Sel}
    try:
        return Run(**{name: parts[name](**x) if name in parts else x for name, x in fields.items()})
    except TypeError as error:
        raise InputError(f"a configuration of another version: {error}") from error
