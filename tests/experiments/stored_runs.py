"""Made-up runs as their folders hold them, with numbers that are easily worked out."""

import json
from pathlib import Path

import numpy as np

from experiments.config import Data, Model, Run, to_dict

LAYERS = 2
STEPS = 60
CONFIG = Run(
    model=Model(layers=LAYERS, width=32, context=16), data=Data(batch_size=8), steps=STEPS, eval_every=10
)
EVAL_LOSSES = {  # at steps 0, 10, ...
    "adamw": [5.6, 4.0, 3.4, 3.2, 3.1, 3.05, 3.0],
    "none": [5.6, 3.9, 3.3, 3.1, 3.0, 2.95, 2.9],
    "stiefel": [5.6, 3.8, 3.2, 3.0, 2.9, 2.85, 2.875],
    "dgram": [5.6, 3.7, 3.3, 9.5],
    "hetero": [5.6, 3.8, 3.1],
    "hetero-inv": [5.6, 3.9, None],
    "my <own> run": [5.6, 4.1, 3.5, 3.3, 3.2, 3.15, 3.125],
}
RESULTS = {
    "dgram": {
        "status": "diverged",
        "step": 30,
        "reason": "",
        "validation_loss": 9.5,
        "best_validation_loss": 3.3,
    },
    "hetero": None,
    "hetero-inv": {
        "status": "non-finite",
        "step": 17,
        "reason": "loss",
        "validation_loss": None,
        "best_validation_loss": 3.9,
    },
}


def eval_line(step: int, loss: float | None, name: str) -> dict:
    scale = 1 + step / 10 if name in ("dgram", "hetero-inv") else 1 + step / 100
    layers = [None, 1.0] if loss is None else [scale, 0.5 * scale]
    held = {"stiefel", "dgram", "hetero", "hetero-inv"}
    weights = {
        "sigma_max": layers,
        "sigma_min": [0.1 / scale, 0.5],
        "gram_off_diagonal": [1e-7, 2e-7] if name in held else layers,
        "violation": [1e-7, 3e-7] if name in held else [0, 0],
    }
    matrices = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")
    solver = {
        matrix: {"iterations": [place, 2 + step // 10], "gap": [0.001 * place, 0.009]}
        for place, matrix in enumerate(matrices)
    }
    return {
        "kind": "eval",
        "step": step,
        "loss": loss,
        "attention": {
            "max_logit": [2 * value if value is not None else None for value in layers],
            "entropy": [2 / scale, 1.5],
            "saturated": [0.01 * scale, 0.0],
            "jacobian": [0.3 / scale, 0.2],
        },
        "weights": dict.fromkeys(matrices, weights),
        **({"solver": solver} if step and name != "adamw" else {}),
    }


def write_run(study_dir: Path, name: str, *, tail: str = "", config: Run = CONFIG) -> Path:
    run_dir = study_dir / name
    run_dir.mkdir(parents=True)
    facts = {
        "config": to_dict(config.with_optimizer("hetero" if name.startswith("my") else name)),
        "versions": {"jax": "0.0.1", "flax": "0.0.2"},
        "corpus": {"fingerprint": "c0ffee", "description": "made-up <text>"},
        "devices": 1,
    }
    (run_dir / "config.json").write_text(json.dumps(facts))
    losses = EVAL_LOSSES[name]
    last = 17 if name == "hetero-inv" else 10 * (len(losses) - 1)
    lines = []
    for step in range(last + 1):
        if step:
            loss = None if step == 17 and name == "hetero-inv" else 3 + 2.6 * np.exp(-step / 10)
            lines.append({"kind": "train", "step": step, "loss": loss})
        if step % 10 == 0:
            lines.append(eval_line(step, losses[step // 10], name))
            lines.append({"kind": "speed", "step": step, "tokens_per_second": 1000.0 + step, "seconds": 1.0})
    if name == "hetero-inv":
        lines.append(eval_line(17, None, name))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    finished = {
        "status": "finished",
        "step": STEPS,
        "reason": "",
        "validation_loss": losses[-1],
        "best_validation_loss": min(loss for loss in losses if loss),
    }
    result = RESULTS.get(name, finished)
    if result is not None:
        (run_dir / "result.json").write_text(json.dumps(result))
    return run_dir
