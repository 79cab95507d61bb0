"""The file of histograms: written, resumed, read back."""

import pytest

from ppo_lightning.errors import DataError
from ppo_lightning.functional import Histogram
from ppo_lightning.io import read_jsonl
from ppo_lightning.metrics import (
    SCHEMA_VERSION,
    BufferHistograms,
    HistogramWriter,
    read_histograms,
)

SCORES = Histogram(edges=(-1.0, 0.1, 1.2), counts=(3, 4))
LENGTHS = Histogram(edges=(2.0, 5.0), counts=(7,))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "histograms.jsonl"


def found(iteration):
    return BufferHistograms(iteration=iteration, raw_score=SCORES, response_length=LENGTHS)


def test_a_row_has_edges_and_counts_by_name(path):
    HistogramWriter(path).write(found(0))
    assert [row for _, row in read_jsonl(path)] == [
        {"schema_version": SCHEMA_VERSION},
        {
            "run/iteration": 0,
            "rollout/raw_score": {"edges": [-1.0, 0.1, 1.2], "counts": [3, 4]},
            "rollout/response_length": {"edges": [2.0, 5.0], "counts": [7]},
        },
    ]


def test_they_come_back(path):
    writer = HistogramWriter(path)
    nothing = BufferHistograms(iteration=1)  # all responses were dropped
    for row in (found(0), nothing, found(2)):
        writer.write(row)
    assert read_histograms(path) == [found(0), nothing, found(2)]


def test_t58_a_resumed_run_writes_each_iteration_once(path):
    writer = HistogramWriter(path)
    for iteration in range(4):
        writer.write(BufferHistograms(iteration=iteration))
    writer = HistogramWriter(path)
    writer.resume(2)
    for iteration in (2, 3, 4):
        writer.write(found(iteration))
    rows = read_histograms(path)
    assert [row.iteration for row in rows] == [0, 1, 2, 3, 4]
    assert [row.raw_score is None for row in rows] == [True, True, False, False, False]
    with pytest.raises(ValueError, match="must rise, got 4 after 4"):
        writer.write(found(4))


def test_a_histogram_that_is_none_is_an_error_with_the_file(path):
    path.parent.mkdir()
    lines = [f'{{"schema_version": {SCHEMA_VERSION}}}']
    lines += ['{"run/iteration": 0, "rollout/raw_score": {"edges": [0, 1]}}']
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="without `edges` and `counts`") as caught:
        read_histograms(path)
    assert str(path) in str(caught.value)
