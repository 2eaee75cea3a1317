"""Command line: `python -m experiments --help` lists the commands."""

import sys
from collections.abc import Sequence

import jax
import tyro

from experiments import preemption
from experiments.commands.comparisons import compare
from experiments.commands.models import export, import_
from experiments.commands.runs import resume, sample, train
from experiments.commands.studies import manifolds, report, sel, spectral
from experiments.errors import InputError
from experiments.preemption import Preempted


def _keep_compiled() -> None:
    """Has JAX keep what it compiles, unless it is told where already.

    A study's runs share most of their programs, and a run that is taken up again all of them.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", "runs/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; bad input ends with its message and exit code 2."""
    _keep_compiled()
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "manifolds": manifolds,
                "sel": sel,
                "spectral": spectral,
                "train": train,
                "resume": resume,
                "sample": sample,
                "export": export,
                "import": import_,
                "report": report,
                "compare": compare,
            },
            prog="python -m experiments",
            args=arguments,
            description="GPT-2 experiments on the geometry of weights.",
        )
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Preempted as preempted:
        print(preempted, file=sys.stderr)
        sys.exit(preemption.EXIT_CODE)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
