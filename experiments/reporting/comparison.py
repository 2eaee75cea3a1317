"""Any runs on one page: in what their settings differ, how they ended, and their curves side by side."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.errors import InputError
from experiments.files import CONFIG
from experiments.reporting import pages, run_panels
from experiments.reporting.pages import Table, text
from experiments.reporting.panels import Styles, styles
from experiments.reporting.records import RunRecord, cut_notes, read_run

_TERMINAL = {
    "run": "run",
    "step": "step",
    "last validation loss": "val. loss",
    "best validation loss": "best",
    "time": "time",
    "tokens/s": "tokens/s",
    "status": "status",
}


def read_all(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs of some folders, each once, in their order; each has the shortest name that no other has.

    Args:
      folders: of runs, or of what holds runs, such as a study.

    Raises:
      InputError: no folder is named, one is not there or has no run, or a file is damaged.
    """
    if not folders:
        raise InputError("name at least one folder of a run, or of a study")
    paths = list(dict.fromkeys(path.resolve() for folder in folders for path in _runs_in(folder)))
    return [
        replace(read_run(path), name=name) for path, name in zip(paths, distinct_names(paths), strict=True)
    ]


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory: name folders of runs or of studies")
    found = []
    for path, inner, files in os.walk(folder):
        inner.sort()
        if CONFIG in files:
            found.append(Path(path))
            inner.clear()  # A run's own folders hold no runs.
    if not found:
        raise InputError(
            f"no run in {folder}: expected a folder with a {CONFIG}, or one that holds such folders"
        )
    return found


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Each path's shortest end that none of the others has; they are absolute, and all different."""

    def name(path: Path) -> str:
        lengths = range(1, len(path.parts) + 1)
        ends = (path.parts[-length:] for length in lengths)
        return str(Path(*next(end for end in ends if sum(x.parts[-len(end) :] == end for x in paths) == 1)))

    return [name(path) for path in paths]


def settings(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """What differs between the runs' settings, texts and versions: its name -> each run's value."""
    flat = [dict(_flat(run.facts)) for run in runs]
    names = dict.fromkeys(name for facts in flat for name in facts)
    values = {name.removeprefix("config."): [str(facts.get(name, "–")) for facts in flat] for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def notes(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader must know before comparing the runs' losses."""
    found = cut_notes(runs)
    texts: dict[tuple[str, int], list[str]] = {}
    for run in runs:
        key = run.facts["corpus"]["fingerprint"], run.config["model"]["vocab_size"]
        texts.setdefault(key, []).append(run.name)
    if len(texts) > 1:
        groups = "; ".join(
            f"{', '.join(names)} (text {fingerprint}, {tokens} tokens in the vocabulary)"
            for (fingerprint, tokens), names in texts.items()
        )
        found.append(f"Losses on different texts or vocabularies do not compare. Together are: {groups}.")
    if len({_held_out(run.config) for run in runs}) > 1:
        found.append(
            "Validation losses are of different windows of held-out text (model.context, data.batch_size, "
            "data.eval_batches): small differences may come from that, and a longer context lowers the loss."
        )
    return found


def _held_out(config: Mapping[str, Any]) -> tuple[int, int]:
    """The size and the number of the windows that a run is evaluated on."""
    return config["model"]["context"], config["data"]["batch_size"] * config["data"]["eval_batches"]


def format_table(runs: Sequence[RunRecord]) -> str:
    """How the runs ended, as aligned plain text."""
    return _results(styles(run.name for run in runs)).plain(runs, _TERMINAL)


def _results(looks: Styles) -> Table:
    return Table(
        {
            "run": lambda run: looks[run.name].label,
            "status": lambda run: run.status,
            "step": lambda run: str(run.step),
            "last validation loss": lambda run: text(run.last),
            "best validation loss": lambda run: text(run.best),
            "time": lambda run: _duration(float(run.seconds(np.array([run.step]))[0])),
            "tokens/s": lambda run: text(float(np.median(run.speeds)) if run.speeds else None, ",.0f"),
        },
        left=("run", "status"),
    )


def _duration(seconds: float) -> str:
    if not np.isfinite(seconds):
        return text(None)
    size, unit = next((pair for pair in ((1, "s"), (60, "min")) if seconds < 120 * pair[0]), (3600, "h"))
    return f"{seconds / size:.3g} {unit}"


def _settings_table(runs: Sequence[RunRecord], looks: Styles) -> str:
    differing = settings(runs)
    if not differing:
        return "<p>All settings are the same.</p>"
    place = {run.name: index for index, run in enumerate(runs)}
    columns = {name: lambda run, each=each: each[place[run.name]] for name, each in differing.items()}
    table = Table({"run": lambda run: looks[run.name].label, **columns}, left=("run",))
    return table.html(runs, color=lambda run: looks[run.name].color)


def write_comparison(runs: Sequence[RunRecord], page: Path) -> Path:
    """Writes the page that compares the runs, and refers to nothing outside itself.

    Args:
      runs: at least one, with different names; those without a result are shown as far as they got.
      page: the file, which ends in .html; its folder is made if need be.

    Returns:
      The page's path.

    Raises:
      InputError: `page` does not end so, or is a folder.
    """
    if page.suffix != ".html" or page.is_dir():
        raise InputError(f"{page} is no name of a page: take one that ends in .html")
    page.parent.mkdir(parents=True, exist_ok=True)
    looks = styles(run.name for run in runs)
    probes = run_panels.largest_singular_values(runs) | run_panels.logits(runs) | run_panels.solver(runs)
    groups = {
        "loss": run_panels.losses(runs),
        "time": run_panels.losses_over_time(runs),
        "update": run_panels.updates(runs),
        "probe": {name: panel for name, panel in probes.items() if panel.recorded},
    }
    return pages.write_page(
        page,
        title="Runs compared",
        template=Path(__file__).with_name("comparison_template.html"),
        words={"count": len(runs)},
        panels={place: run_panels.draw(group, looks) for place, group in groups.items()},
        tables={
            "results": _results(looks).html(runs, color=lambda run: looks[run.name].color),
            "settings": _settings_table(runs, looks),
        },
        notes=notes(runs),
    )
