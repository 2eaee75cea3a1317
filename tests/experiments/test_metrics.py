"""The metrics' file and events, also after a kill."""

import json
import struct

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from experiments.files import METRICS
from experiments.loggers import open_loggers
from experiments.metrics import MetricsWriter, read_metrics


def read_events(run_dir):
    """All TensorBoard events of a run: length, checksum, record, checksum, and so on."""
    events = []
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            events.append(event_pb2.Event.FromString(data[position + 12 : position + 12 + length]))
            position += 16 + length
    return events


def scalars(run_dir):
    return {
        (value.tag, event.step): value.simple_value
        for event in read_events(run_dir)
        for value in event.summary.value
    }


def write_steps(run_dir, steps, resume_step=None):
    with MetricsWriter(open_loggers(run_dir, resume_step)) as metrics:
        for step in steps:
            metrics.write("train", step, loss=np.float32(step) / 3)


def test_lines_hold_plain_numbers_and_null_where_not_finite(tmp_path):
    with MetricsWriter(open_loggers(tmp_path)) as metrics:
        metrics.write("train", 1, loss=np.float32(0.1), gradient_norm=np.float32("nan"))
        layers = np.array([1.5, np.inf, -2.0], np.float32)
        metrics.write(
            "eval", 1, loss=2.0, attention={"entropy": layers}, weights={"mlp/c_fc": {"sigma_max": layers}}
        )
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(lines[0]) == {
        "kind": "train",
        "step": 1,
        "loss": float(np.float32(0.1)),
        "gradient_norm": None,
    }
    evaluation = json.loads(lines[1])
    assert evaluation["attention"] == {"entropy": [1.5, None, -2.0]}
    assert evaluation["weights"]["mlp/c_fc"] == {"sigma_max": [1.5, None, -2.0]}


def test_events_hold_the_largest_finite_number_over_the_layers(tmp_path):
    with MetricsWriter(open_loggers(tmp_path)) as metrics:
        metrics.write("train", 1, loss=0.5, gradient_norm=float("inf"))
        layers = np.array([1.5, np.inf, -2.0])
        metrics.write(
            "eval",
            2,
            loss=2.0,
            attention={"entropy": layers, "jacobian": np.full(3, np.nan)},
            weights={"mlp/c_fc": {"sigma_max": -layers}},
        )
    assert scalars(tmp_path) == {
        ("train/loss", 1): 0.5,
        ("eval/loss", 2): 2.0,
        ("attention/entropy", 2): 1.5,
        ("weights/mlp/c_fc/sigma_max", 2): 2.0,
    }


def test_lines_are_readable_before_the_writer_closes(tmp_path):
    with MetricsWriter(open_loggers(tmp_path)) as metrics:
        metrics.write("train", 1, loss=1.0)
        assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_resuming_drops_later_lines_and_a_line_cut_short(tmp_path):
    write_steps(tmp_path, range(1, 8))
    path = tmp_path / METRICS
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:20])
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 8))

    write_steps(tmp_path, range(5, 8), resume_step=4)
    assert path.read_text() == whole
    assert not list(tmp_path.glob("*.tmp"))


def test_a_cut_line_goes_even_if_every_step_stays(tmp_path):
    write_steps(tmp_path, range(1, 5))
    path = tmp_path / METRICS
    whole = path.read_text()
    path.write_text(whole + '{"kind": "train", "st')
    write_steps(tmp_path, [], resume_step=4)
    assert path.read_text() == whole


def test_starting_anew_drops_all_lines(tmp_path):
    write_steps(tmp_path, range(4))
    write_steps(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize(("resume_step", "purged_from"), [(None, 0), (4, 5)])
def test_tensorboard_hides_what_was_dropped(tmp_path, resume_step, purged_from):
    write_steps(tmp_path, [1], resume_step)
    (start,) = [event for event in read_events(tmp_path) if event.HasField("session_log")]
    assert start.session_log.status == event_pb2.SessionLog.START
    assert start.step == purged_from


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
    write_steps(tmp_path, range(3))
    path = tmp_path / METRICS
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{half", lines[2], ""]))
    with pytest.raises(ValueError, match=r"line 2.*not JSON"):
        read_metrics(tmp_path)
