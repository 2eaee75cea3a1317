"""A run that has ended, and its model as transformers reads it."""

import pytest

from experiments.exchange.folders import export_run
from tests.experiments.exchange.runs import SETTINGS, trained


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(SETTINGS, tmp_path_factory.mktemp("exchange"))


@pytest.fixture(scope="module")
def model_dir(run_dir):
    export_run(run_dir, run_dir.parent / "model")
    return run_dir.parent / "model"
