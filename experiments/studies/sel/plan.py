"""The plan of an SEL study: its grid of models, its runs and their names, and which rates are tried."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from experiments.config import ADAMW, Data, Model, Optimizer, Run
from experiments.errors import InputError
from experiments.files import read_json
from experiments.studies.plans import load_plan, save_plan

PLAN = "sel.json"
Purpose = Literal["grid", "calibration"]

BASELINE, SEL = "adamw", "sel"
ABLATIONS: dict[str, dict[str, Any]] = {
    "sel-no-linear-path": {"linear": False},
    "sel-congruent-start": {"start": "congruent"},
    "sel-fixed-multipliers": {"annealed": False},
    "sel-fixed-scales": {"learnable": False},
}
"""Name of an ablation -> what it changes in `config.Sel`."""
METHODS = (BASELINE, SEL, *ABLATIONS)

ANNEALINGS: dict[str, dict[str, Any]] = {
    "off": {"annealed": False},
    "tenfold": {"e_first": 1.0, "e_last": 0.1, "m_first": 0.1, "m_last": 1.0},
    "raised": {"e_first": 3.0, "e_last": 1.0, "m_first": 1.0, "m_last": 3.0},
    "tripled": {"e_first": 3.0, "e_last": 0.3, "m_first": 0.3, "m_last": 3.0},
}
"""The courses of the scales' rates that a calibration compares, by name."""
FIXED = "off"
"""The course under which a calibration compares curvatures."""


class Cell(NamedTuple):
    """A model's shape."""

    width: int
    layers: int

    def __str__(self) -> str:
        return f"w{self.width}-d{self.layers}"


class Trial(NamedTuple):
    """One run of a grid."""

    cell: Cell
    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder's."""
        return f"{self.cell}-{self.method}-lr{self.rate:g}-s{self.seed}"


@dataclass(frozen=True)
class SelStudy:
    """A study whole: the contents of its `sel.json`."""

    base: Run
    """Of every run, but for the width, the depth, the heads, the method, the rate and the seed."""
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    head_size: int
    """Features of a head: width grows the number of heads."""
    rates: tuple[float, ...]
    """AdamW's peak rates that each method tries in each cell, ascending by factors of 2."""
    extensions: int = 2
    """Most rates that a sweep may add beyond the ends of the grid."""
    seeds: int = 3
    """Runs at each method's best rate, and of each course in a calibration; a sweep's own, seed 0, is one of
    them."""
    ablation: tuple[int, int] = (128, 4)
    """Width and depth at which the ablations are made."""
    curvatures: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Of the map, that a calibration compares."""
    calibration_rates: tuple[float, ...] = (1e-3, 2e-3)
    """At which it compares them."""

    def __post_init__(self) -> None:
        for name in ("widths", "depths", "rates", "curvatures", "calibration_rates"):
            if not getattr(self, name):
                raise InputError(f"an SEL study needs at least one of its {name}")
        if self.seeds < 1 or self.extensions < 0:
            raise InputError("an SEL study needs at least 1 seed, and 0 or more extensions")
        if self.base.optimizer.name != ADAMW:
            raise InputError(f"an SEL study compares with {ADAMW}: its runs cannot have another optimizer")
        if Cell(*self.ablation) not in self.cells:
            raise InputError(f"the ablations' model {Cell(*self.ablation)} is not in the grid")
        if odd := [width for width in self.widths if width % self.head_size]:
            raise InputError(f"width {odd[0]} is not a multiple of an SEL study's head_size {self.head_size}")
        for cell in self.cells:
            self.config(Trial(cell, SEL, self.rates[0], 0))

    @property
    def cells(self) -> list[Cell]:
        """The grid, narrow models first."""
        return [Cell(width, layers) for width in self.widths for layers in self.depths]

    @property
    def middle(self) -> Cell:
        """Where the map is calibrated."""
        return Cell(self.widths[len(self.widths) // 2], self.depths[len(self.depths) // 2])

    def config(self, trial: Trial) -> Run:
        """A trial's run."""
        changes = ABLATIONS.get(trial.method, {})
        model = replace(
            self.base.model,
            width=trial.cell.width,
            layers=trial.cell.layers,
            heads=trial.cell.width // self.head_size,
        )
        return replace(
            self.base,
            model=model,
            optimizer=replace(self.base.optimizer, learning_rate=trial.rate),
            sel=replace(self.base.sel, on=trial.method != BASELINE, **changes),
            seed=trial.seed,
        )

    def calibration(self, curvature: float, rate: float, annealing: str, seed: int) -> Run:
        """A run of the calibration: a curvature, a rate, one of `ANNEALINGS`, and a seed."""
        run = self.config(Trial(self.middle, SEL, rate, seed))
        return replace(run, sel=replace(run.sel, curvature=curvature, **ANNEALINGS[annealing]))

    def save(self, study_dir: Path, purpose: Purpose) -> None:
        """Writes `sel.json`, or checks that the one that is there says the same.

        Raises:
          InputError: it does not.
        """
        save_plan(study_dir / PLAN, {"purpose": purpose, **asdict(self)})

    @classmethod
    def load(cls, study_dir: Path) -> tuple["SelStudy", Purpose]:
        """What `save` wrote.

        Raises:
          InputError: the file is damaged.
        """
        path = study_dir / PLAN
        purpose = read_json(path, require=("purpose",))["purpose"]
        if purpose not in get_args(Purpose):
            raise InputError(f"{path}: purpose {purpose!r} is none of {', '.join(get_args(Purpose))}")
        return load_plan(path, cls, drop=("purpose",)), purpose


SEL_PRESETS: dict[str, SelStudy] = {
    # About 65 runs in an hour on two cores. AdamW's best rate is 4e-3 at width 64 and 2e-3 above, far more
    # than in long runs, and evaluations come often because steps to a loss are read off their curve.
    "tiny": SelStudy(
        base=Run(
            model=Model(context=64),
            data=Data(eval_batches=10),
            optimizer=Optimizer(name=ADAMW, learning_rate=4e-3),
            steps=240,
            eval_every=12,
            checkpoint_every=240,
        ),
        widths=(64, 128, 192),
        depths=(2, 4),
        head_size=32,
        rates=(1e-3, 2e-3, 4e-3),
        seeds=2,
    ),
    # The paper's nine models whole: OpenWebText, widths 1024 to 3072, depths 12 to 36. The source gives no
    # batch, length or rates. These are the usual ones for GPT-2: half a million tokens an update for 10
    # billion tokens, and rates about 3e-4; one seed, as nothing is said of more.
    "paper": SelStudy(
        base=Run(
            model=Model(
                vocab_size=50304,
                context=1024,
                layers=12,
                heads=16,
                width=1024,
                compute_dtype="bfloat16",
                remat=True,
            ),
            data=Data(corpus="data/openwebtext", batch_size=512, accumulation=16, eval_batches=10),
            optimizer=Optimizer(name=ADAMW, learning_rate=3e-4, warmup_steps=1000),
            steps=20_000,
            eval_every=250,
            checkpoint_every=1000,
        ),
        widths=(1024, 2048, 3072),
        depths=(12, 24, 36),
        head_size=64,
        rates=(1.5e-4, 3e-4, 6e-4),
        seeds=1,
        ablation=(1024, 12),
        calibration_rates=(3e-4, 6e-4),
    ),
}
