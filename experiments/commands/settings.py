"""A run's settings as arguments: the name of a preset, and what is changed of it."""

import tyro

from experiments.config import PRESETS

Settings = tyro.extras.subcommand_type_from_defaults(
    PRESETS,
    {
        "demo": "Settings from preset demo: 150 steps on the standard library's source.",
        "tiny": "Settings from preset tiny: 600 steps on the standard library's source.",
        "narrow": "Settings from preset narrow: half tiny's width and context, 150 steps.",
        "gpt2-small": "Settings from preset gpt2-small: the paper's, on OpenWebText.",
    },
)
