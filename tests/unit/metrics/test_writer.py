import json
import math

import pytest

from ppo_lightning.errors import DataError
from ppo_lightning.io import read_jsonl
from ppo_lightning.metrics import (
    SCHEMA_VERSION,
    AnswerStats,
    ComponentStats,
    IterationStats,
    MetricsWriter,
    read_metrics,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def stats(iteration, **values):
    return IterationStats(iteration=iteration, **values)


def write(path, *iterations):
    writer = MetricsWriter(path)
    for iteration in iterations:
        writer.write(stats(iteration, kl_ref=float(iteration)))
    return writer


def rows(path):
    return [row for _, row in read_jsonl(path)]


def test_file_is_a_header_and_one_row_an_iteration(path):
    write(path, 0, 1)
    assert rows(path) == [
        {"schema_version": SCHEMA_VERSION},
        {"run/iteration": 0, "rollout/kl_ref": 0.0},
        {"run/iteration": 1, "rollout/kl_ref": 1.0},
    ]
    assert isinstance(rows(path)[1]["run/iteration"], int)


def test_file_is_there_from_the_first_iteration_on(path):
    MetricsWriter(path)
    assert not path.exists()
    write(path, 0)
    assert len(read_metrics(path)) == 1


def test_records_come_back(path):
    record = stats(
        0,
        score_mean=0.1 + 0.2,
        components={"größe": ComponentStats(raw=1.0, weighted=2.0)},
        val_greedy=AnswerStats(gold=3.0),
    )
    MetricsWriter(path).write(record)
    assert read_metrics(path) == [record]


def test_numbers_that_are_not_finite_are_null_and_named(path):
    MetricsWriter(path).write(stats(0, kl_ref=1.0, value_loss=math.nan, ratio_max=math.inf))

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    text = path.read_text().splitlines()[1]
    row = json.loads(text, parse_constant=refuse)
    assert row["update/value_loss"] is row["update/ratio_max"] is None
    assert set(row["nonfinite"]) == {"update/value_loss", "update/ratio_max"}
    (back,) = read_metrics(path)
    assert back.kl_ref == 1
    assert math.isnan(back.value_loss)
    assert math.isnan(back.ratio_max)


def test_t58_iterations_only_go_up(path):
    writer = write(path, 0, 1)
    for iteration in (1, 0):
        with pytest.raises(ValueError, match=f"`iteration` must rise, got {iteration} after 1"):
            writer.write(stats(iteration))
    assert [row.iteration for row in read_metrics(path)] == [0, 1]


def test_t58_resumed_run_writes_each_iteration_once(path):
    write(path, 0, 1, 2, 3)
    writer = MetricsWriter(path)
    writer.resume(2)
    assert [row.iteration for row in read_metrics(path)] == [0, 1]
    for iteration in (2, 3, 4):
        writer.write(stats(iteration, kl_ref=9.0))
    assert [(row.iteration, row.kl_ref) for row in read_metrics(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 9.0),
        (3, 9.0),
        (4, 9.0),
    ]
    assert len(list(path.parent.iterdir())) == 1


def test_t58_resumed_run_does_not_go_back_either(path):
    write(path, 0, 1, 2)
    writer = MetricsWriter(path)
    writer.resume(2)
    with pytest.raises(ValueError, match="must rise, got 1 after 1"):
        writer.write(stats(1))


def test_resume_into_an_empty_folder_starts_a_file(path):
    writer = MetricsWriter(path)
    writer.resume(5)
    writer.write(stats(5))
    assert [row.iteration for row in read_metrics(path)] == [5]


def test_resume_leaves_kept_rows_as_they_are(path):
    write(path, 0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"run/iteration": 1, "mine/é": 0.30000000000000004}\n')
    kept = path.read_bytes()
    write_more = MetricsWriter(path)
    write_more.resume(2)
    assert path.read_bytes() == kept


def test_row_that_a_killed_run_left_half_written_is_dropped(path):
    write(path, 0, 1)
    with path.open("a") as file:
        file.write('{"run/iteration": 2, "rollo')
    assert [row.iteration for row in read_metrics(path)] == [0, 1]
    writer = MetricsWriter(path)
    writer.resume(2)
    writer.write(stats(2))
    assert [row.iteration for row in read_metrics(path)] == [0, 1, 2]


def test_row_that_is_broken_within_the_file_is_an_error(path):
    write(path, 0, 1)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:9], lines[2]]) + "\n")
    for read in (lambda: read_metrics(path), lambda: MetricsWriter(path).resume(1)):
        with pytest.raises(DataError) as caught:
            read()
        assert str(caught.value).startswith(f"{path}:2:")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ('{"schema_version": 0}\n', 1),
        ('{"run/iteration": 0}\n', 1),
        (f'{{"schema_version": {SCHEMA_VERSION}}}\n{{"rollout/kl_ref": 0}}\n', 2),
    ],
)
def test_other_files_are_refused_and_left_alone(path, text, line):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        MetricsWriter(path).resume(0)
    assert str(caught.value).startswith(f"{path}:{line}:")
    assert path.read_text() == text


def test_new_run_keeps_the_file_of_an_earlier_one(path):
    write(path, 0, 1)
    write(path, 0)
    write(path, 0, 1, 2)
    found = {file.name: len(read_metrics(file)) for file in path.parent.iterdir()}
    assert found == {"metrics.1.jsonl": 2, "metrics.2.jsonl": 1, "metrics.jsonl": 3}
