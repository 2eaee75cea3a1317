"""The plan of a study of the spectral parametrisation: its models, its runs and their names."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.config import ADAMW, PARAMETRIZATIONS, SGD, Data, Model, Optimizer, Run
from experiments.errors import InputError
from experiments.studies.plans import load_plan, save_plan

PLAN = "spectral.json"
STANDARD, SPECTRAL = "standard", "spectral"
MUON = "none"
OPTIMIZERS = (ADAMW, SGD, MUON)
Growth = Literal["heads", "head_size"]
"""What a wider model has more of: heads, or features in each head."""


class Sweep(NamedTuple):
    """A parametrisation under an optimizer at one width."""

    parametrization: str
    optimizer: str
    width: int


class Trial(NamedTuple):
    """One run."""

    parametrization: str
    optimizer: str
    width: int
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder's."""
        return f"{self.parametrization}-{self.optimizer}-w{self.width}-lr{self.rate:g}-s{self.seed}"

    @property
    def sweep(self) -> Sweep:
        """What it belongs to."""
        return Sweep(*self[:3])


class Check(NamedTuple):
    """One coordinate check."""

    parametrization: str
    optimizer: str
    growth: Growth

    @property
    def name(self) -> str:
        """Its file's, without the ending."""
        return f"check-{self.parametrization}-{self.optimizer}-{self.growth}"


@dataclass(frozen=True)
class SpectralStudy:
    """A study whole: the contents of its `spectral.json`."""

    base: Run
    """Of every run, but for the width, the heads, the parametrisation, the optimizer, the rate and the seed;
    its model's base width and heads are the spectral parametrisation's."""
    widths: tuple[int, ...]
    """At which rates are swept, ascending."""
    rates: dict[str, tuple[float, ...]]
    """Optimizer -> peak rates that are tried at every width, ascending by factors of 2. Muon's are those of
    the matrices."""
    check_rates: dict[str, float]
    """Optimizer -> constant rate of the coordinate checks."""
    adam_share: float = 0.15
    """Under Muon, AdamW's rate for the other parameters over Muon's."""
    sgd_momentum: float = 0.9
    extensions: int = 4
    """Most rates that a sweep may add beyond the ends of the grid."""
    seeds: int = 2
    """Runs at every rate."""
    check_widths: tuple[int, ...] = (64, 128, 256, 512)
    check_steps: int = 10
    check_seeds: int = 3

    def __post_init__(self) -> None:
        for widths in (self.widths, self.check_widths):
            if len(widths) < 2 or list(widths) != sorted(set(widths)):
                raise InputError(f"a spectral study needs two or more ascending widths, got {widths}")
        if self.rates.keys() != self.check_rates.keys() or not set() < self.rates.keys() <= set(OPTIMIZERS):
            raise InputError(
                f"a spectral study has rates and check_rates for the same ones of {', '.join(OPTIMIZERS)}"
            )
        for name, rates in self.rates.items():
            if not rates or list(rates) != sorted(set(rates)):
                raise InputError(f"a spectral study needs ascending rates for {name}, got {rates}")
        if min(self.seeds, self.check_seeds, self.check_steps) < 1 or self.extensions < 0:
            raise InputError("a spectral study needs at least 1 seed and 1 step, and 0 or more extensions")
        for sweep in self.sweeps:
            for rate in self.rates[sweep.optimizer]:
                self.config(Trial(*sweep, rate, 0))
        for check in self.checks:
            for width in self.check_widths:
                self.check_config(check, width, 0)

    @property
    def sweeps(self) -> list[Sweep]:
        """All of them, those that cost least first."""
        return [
            Sweep(parametrization, optimizer, width)
            for width in self.widths
            for optimizer in self.rates
            for parametrization in PARAMETRIZATIONS
        ]

    @property
    def checks(self) -> list[Check]:
        """Both parametrisations with more heads, and the spectral one with larger heads too."""
        pairs = ((STANDARD, "heads"), (SPECTRAL, "heads"), (SPECTRAL, "head_size"))
        return [Check(each, optimizer, growth) for optimizer in self.rates for each, growth in pairs]

    def config(self, trial: Trial) -> Run:
        """A trial's run; the width grows the number of heads."""
        run = self._model(trial.parametrization, trial.width, "heads")
        return replace(run, optimizer=self._optimizer(trial.optimizer, trial.rate), seed=trial.seed)

    def check_config(self, check: Check, width: int, seed: int) -> Run:
        """The run of a coordinate check, whose rate is constant."""
        optimizer = self._optimizer(check.optimizer, self.check_rates[check.optimizer])
        return replace(
            self._model(check.parametrization, width, check.growth),
            optimizer=replace(optimizer, warmup_steps=0, final_fraction=1.0),
            steps=self.check_steps,
            seed=seed,
        )

    def _model(self, parametrization: str, width: int, growth: Growth) -> Run:
        model = self.base.model
        heads, rest = divmod(model.base_heads * width, model.base_width)
        if rest and growth == "heads":
            raise InputError(
                f"width {width} is no multiple of the heads' size, {model.base_width // model.base_heads}"
            )
        return replace(
            self.base,
            model=replace(
                model,
                parametrization=parametrization,
                width=width,
                heads=heads if growth == "heads" else model.base_heads,
            ),
        )

    def _optimizer(self, name: str, rate: float) -> Optimizer:
        settings = replace(self.base.optimizer, name=name)
        if name == MUON:
            return replace(settings, muon_learning_rate=rate, learning_rate=self.adam_share * rate)
        if name == SGD:
            settings = replace(settings, momentum=self.sgd_momentum)
        return replace(settings, learning_rate=rate)

    def save(self, study_dir: Path) -> None:
        """Writes `spectral.json`, or checks that the one that is there says the same.

        Raises:
          InputError: it does not.
        """
        save_plan(study_dir / PLAN, asdict(self))

    @classmethod
    def load(cls, study_dir: Path) -> "SpectralStudy":
        """What `save` wrote.

        Raises:
          InputError: the file is damaged.
        """
        return load_plan(study_dir / PLAN, cls)


def trial_of(config: dict[str, Any]) -> Trial:
    """What a stored run is, from its configuration."""
    model, optimizer = config["model"], config["optimizer"]
    rate = "muon_learning_rate" if optimizer["name"] == MUON else "learning_rate"
    return Trial(model["parametrization"], optimizer["name"], model["width"], optimizer[rate], config["seed"])


SPECTRAL_PRESETS: dict[str, SpectralStudy] = {
    "tiny": SpectralStudy(
        base=Run(
            model=Model(context=64, layers=2, base_width=32, base_heads=2),
            data=Data(eval_batches=20),
            optimizer=Optimizer(name=ADAMW, weight_decay=0.0),
            steps=120,
            eval_every=20,
            checkpoint_every=120,
            alignment=True,
        ),
        widths=(32, 64, 128, 256),
        rates={ADAMW: (8e-3, 16e-3, 32e-3), SGD: (0.2, 0.4, 0.8), MUON: (0.04, 0.08, 0.16)},
        check_rates={ADAMW: 8e-3, SGD: 0.2, MUON: 0.04},
    ),
    # GPT-2 small's depth and text at widths from 256 to 2048; rates are tuned at the smallest.
    "paper": SpectralStudy(
        base=Run(
            model=Model(
                vocab_size=50304,
                context=1024,
                layers=12,
                base_width=256,
                base_heads=4,
                compute_dtype="bfloat16",
                remat=True,
            ),
            data=Data(corpus="data/openwebtext", batch_size=256, accumulation=8, eval_batches=20),
            optimizer=Optimizer(name=ADAMW, warmup_steps=500),
            steps=5_000,
            eval_every=250,
            checkpoint_every=1000,
            alignment=True,
        ),
        widths=(256, 512, 1024, 2048),
        rates={ADAMW: (1e-3, 2e-3, 4e-3), SGD: (0.1, 0.2, 0.4), MUON: (0.01, 0.02, 0.04)},
        check_rates={ADAMW: 1e-3, SGD: 0.1, MUON: 0.02},
    ),
}
