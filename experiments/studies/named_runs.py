"""What studies with many short runs share."""

from collections.abc import Callable
from pathlib import Path

from experiments.config import Run
from experiments.corpus import Corpus, load
from experiments.reporting.records import final_loss
from experiments.train import train


def load_corpus(config: Run) -> Corpus:
    """A run's text."""
    return load(config.data.corpus, vocab_size=config.model.vocab_size, context=config.model.context)


def train_named(config: Run, run_dir: Path, corpus: Corpus, progress: bool) -> float | None:
    """Trains, says how it ended, and gives the final loss; None if the run ended before its last update."""
    result = train(config, run_dir, corpus=corpus, progress=progress)
    loss = result.validation_loss
    shown = "not finite" if loss is None else f"{loss:.4f}"
    print(f"{run_dir.name}: {result.status}, validation loss {shown}", flush=True)
    return final_loss(result.status, loss)


def conclude(
    study_dir: Path, write_report: Callable[[Path], Path], format_table: Callable[[Path], str]
) -> Path:
    """Writes a study's report, prints its table and where the report is, and gives that path."""
    report = write_report(study_dir)
    print(format_table(study_dir))
    print(f"Report: {report}")
    return report
