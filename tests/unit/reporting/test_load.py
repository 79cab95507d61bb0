"""Logs of every kind and state: what is read, what is left out and said, and what is refused."""

import json
import math

import pytest

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.reporting import load_run
from tests.helpers.report_runs import change, healthy_row, write_metrics

HEAD = "iter,reward_mean,reward_std,kl_ref,entropy"


def csv_file(folder, *lines, head=HEAD, end="\n", name="log.csv"):
    path = folder / name
    path.write_text("\n".join([head, *lines]) + end, encoding="utf-8")
    return path


def jsonl_file(folder, rows, name="log.jsonl", end="\n"):
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows) + end, encoding="utf-8")
    return path


def iterations(run):
    return [row.iteration for row in run.rows]


# Our own files


def test_our_own_file_is_read_as_it_was_written(tmp_path):
    rows = [healthy_row(i) for i in range(3)]
    write_metrics(tmp_path, rows, {1: [change(1, "kl_coef", 0.1, 0.2, reason="too far")]})
    run = load_run(tmp_path)
    assert run.rows == rows
    assert [(c.iteration, c.dial, c.before, c.after, c.reason) for c in run.changes] == [
        (1, "kl_coef", 0.1, 0.2, "too far")
    ]
    assert run.notes == []


def test_what_was_not_finite_is_nan_again(tmp_path):
    write_metrics(tmp_path, [healthy_row(0, policy_loss=math.inf)])
    assert math.isnan(load_run(tmp_path / "metrics.jsonl").rows[0].policy_loss)


def test_another_version_of_the_file_is_refused(tmp_path):
    path = jsonl_file(tmp_path, [{"schema_version": 99}, {"run/iteration": 0}])
    with pytest.raises(DataError, match="schema_version: 99"):
        load_run(path)


def test_a_supervised_run_is_refused(tmp_path):
    path = jsonl_file(tmp_path, [{"schema_version": 1}, {"run/step": 8, "train/loss": 0.5}])
    with pytest.raises(DataError, match="supervised training"):
        load_run(path)


# Which file of a folder


def test_the_newest_version_of_a_logger_is_taken(tmp_path):
    for version, score in ((2, 0.0), (10, 1.0), (9, 0.5)):
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        write_metrics(folder, [healthy_row(0, raw_score_mean=score)])
    assert load_run(tmp_path).rows[0].raw_score_mean == 1.0


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path):
    for name in ("a", "b"):
        write_metrics(tmp_path / name / "logs", [healthy_row(0)])
    with pytest.raises(DataError, match=r"several runs.*a/logs`, `.*b/logs`"):
        load_run(tmp_path)


@pytest.mark.parametrize("names", [("a", "b"), ("seed_0", "seed_1"), ("version_0", "mine")])
def test_runs_that_are_no_versions_are_not_chosen_among(tmp_path, names):
    for name in names:
        write_metrics(tmp_path / name, [healthy_row(0)])
    with pytest.raises(DataError, match=f"several runs.*{names[-1]}"):
        load_run(tmp_path)


def test_what_was_passed_over_is_said(tmp_path):
    for name in ("version_0", "version_1"):
        write_metrics(tmp_path / name, [healthy_row(0)])
    assert load_run(tmp_path).notes == ["`version_1` is the newest of 2 versions"]
    assert load_run(tmp_path / "version_1").notes == []


def test_parts_of_a_run_below_it_are_no_runs(tmp_path):
    write_metrics(tmp_path / "version_0", [healthy_row(0)])
    write_metrics(tmp_path / "version_0" / "part", [healthy_row(5)])
    assert iterations(load_run(tmp_path)) == [0]


def test_lightnings_csv_is_read_with_rows_of_one_step_put_together(tmp_path):
    lines = ["0,0.1,,0", "0,,3.0,0", "1,0.2,,1"]
    head = "step,rollout/kl_ref,val/sampled/gold,epoch"
    csv_file(tmp_path, *lines, head=head, name="metrics.csv")
    run = load_run(tmp_path)
    assert iterations(run) == [0, 1]
    assert run.rows[0].kl_ref == 0.1
    assert run.rows[0].val_sampled.gold == 3.0
    assert run.rows[1].val_sampled is None


def test_event_files_are_read_the_later_process_last(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for suffix, start, score in (("1", 0, 0.0), ("2", 1, 5.0)):
        writer = SummaryWriter(str(tmp_path), filename_suffix=suffix)
        for step in range(start, start + 3):
            writer.add_scalar("rollout/raw_score_mean", score + step, step)
            writer.add_text("samples", "a text", step)
        writer.close()
    files = sorted(tmp_path.glob("*tfevents*"))
    files[0].rename(tmp_path / "events.out.tfevents.1.a")
    files[1].rename(tmp_path / "events.out.tfevents.2.a")
    run = load_run(tmp_path)
    assert iterations(run) == [0, 1, 2, 3]
    assert [row.raw_score_mean for row in run.rows] == [0.0, 6.0, 7.0, 8.0]


def event_files(folder, *contents):
    """Write an event file for each mapping of a name to its steps and values."""
    from torch.utils.tensorboard import SummaryWriter

    for number, content in enumerate(contents):
        writer = SummaryWriter(str(folder / "new"))
        for name, values in content.items():
            for step, value in values.items():
                writer.add_scalar(name, value, step)
        writer.close()
        (file,) = (folder / "new").glob("*tfevents*")
        file.rename(folder / f"events.out.tfevents.{number}")


def test_event_files_of_other_writers_stand_beside_each_other(tmp_path):
    steps = {i: float(i) for i in range(4)}
    event_files(
        tmp_path,
        {"rollout/kl_ref": steps, "epoch": steps},
        {"val/sampled/gold": {0: 5.0, 2: 6.0}, "epoch": {0: 0.0, 2: 2.0}},
        {"rollout/kl_ref": {2: 12.0, 3: 13.0}},  # resumed
        {"val/sampled/gold": {2: 7.0, 9: 8.0}},
    )
    run = load_run(tmp_path)
    assert iterations(run) == [0, 1, 2, 3, 9]
    assert [row.kl_ref for row in run.rows] == [0.0, 1.0, 12.0, 13.0, None]
    golds = [None if r.val_sampled is None else r.val_sampled.gold for r in run.rows]
    assert golds == [5.0, None, 7.0, None, 8.0]


def test_a_broken_end_of_an_event_file_is_left_out_and_said(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in range(3):
        writer.add_scalar("rollout/kl_ref", step, step)
    writer.close()
    file = next(tmp_path.glob("*tfevents*"))
    assert load_run(file).notes == []
    file.write_bytes(file.read_bytes()[:-20])
    run = load_run(file)
    assert iterations(run) == [0, 1]
    assert run.notes == [f"{file.name} ends in a record that is cut off"]


def test_an_event_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"no records at all, but long enough to look for some")
    with pytest.raises(DataError, match="holds no numbers of TensorBoard"):
        load_run(path)


# Broken, odd and empty files


def test_cells_that_are_empty_or_no_numbers_are_not_measured_and_nan_stays(tmp_path):
    run = load_run(csv_file(tmp_path, "0,1.0,,nan,n/a", "1,2.0,inf,0.5,1.9"))
    first, second = run.rows
    assert (first.raw_score_std, first.entropy) == (None, None)
    assert math.isnan(first.kl_ref)
    assert second.raw_score_std == math.inf


def test_a_last_line_that_is_cut_off_is_left_out_and_said(tmp_path):
    run = load_run(csv_file(tmp_path, "0,1,1,0,2", "1,1,1", end=""))
    assert iterations(run) == [0]
    assert "the last line is cut off, and was left out" in run.notes
    path = jsonl_file(tmp_path, [{"step": i, "rollout/kl_ref": 0.1} for i in range(2)])
    path.write_text(path.read_text() + '{"step": 2, "rollo', encoding="utf-8")
    run = load_run(path)
    assert iterations(run) == [0, 1]
    assert "the last line is cut off, and was left out" in run.notes


def test_broken_lines_in_the_middle_are_named(tmp_path):
    path = jsonl_file(tmp_path, [{"step": i, "rollout/kl_ref": 0.1} for i in range(3)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{{{", *lines[1:]]) + "\n", encoding="utf-8")
    run = load_run(path)
    assert iterations(run) == [0, 1, 2]
    assert run.notes == ["1 line could not be read, and left out: 2"]


def test_numbers_beyond_all_counting_are_no_iterations(tmp_path):
    run = load_run(csv_file(tmp_path, "0,1,1,0,2", "1e300,1,1,0,2", "1,1,1,0,2"))
    assert iterations(run) == [0, 1]
    assert run.notes == ["1 row(s) without a number in `iter` were left out"]


def test_a_cell_may_hold_a_long_text(tmp_path):
    lines = [f'{i},1,1,0,2,"{"x" * 200_000}"' for i in range(2)]
    assert iterations(load_run(csv_file(tmp_path, *lines, head=f"{HEAD},text"))) == [0, 1]


def test_one_row_is_a_run(tmp_path):
    assert iterations(load_run(csv_file(tmp_path, "7,1,1,0,2"))) == [7]


def test_a_resumed_run_counts_with_its_later_rows_and_none_of_the_abandoned_ones(tmp_path):
    lines = ["0,0,1,0,2", "1,1,1,0,2", "2,2,1,0,2", "3,3,1,0,2", "1,11,1,0,2", "2,12,1,0,2"]
    run = load_run(csv_file(tmp_path, *lines))
    assert [row.raw_score_mean for row in run.rows] == [0.0, 11.0, 12.0]
    assert any("resumed 1 time" in note for note in run.notes)


def test_rows_out_of_order_are_sorted_and_this_is_said(tmp_path):
    run = load_run(csv_file(tmp_path, "2,2,1,0,2", "0,0,1,0,2", "1,1,1,0,2"))
    assert [row.raw_score_mean for row in run.rows] == [0.0, 1.0, 2.0]
    assert any("out of order" in note for note in run.notes)


def test_rows_without_an_axis_are_counted(tmp_path):
    run = load_run(csv_file(tmp_path, "1,1,0", "2,1,0", head="reward_mean,reward_std,kl_ref"))
    assert iterations(run) == [0, 1]
    assert "no column numbers the iterations: rows are counted" in run.notes


def test_blank_lines_before_the_names_are_no_names(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(f"\n\r\n{HEAD}\n\n0,1,1,0,2\n", encoding="utf-8")
    assert load_run(path).rows[0].entropy == 2.0


@pytest.mark.parametrize("delimiter", ["\t", ";"])
def test_other_delimiters_and_a_byte_order_mark(tmp_path, delimiter):
    text = f"{HEAD}\n0,1,1,0,2\n".replace(",", delimiter)
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_run(path).rows[0].entropy == 2.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "is a binary file"),
        (b"just some words\n", "is no log"),
        (b"a,b,c\n1,2,3\n", "no column that is known here; it has `a`, `b`, `c`"),
        (b'{"loss": 1.0}\n', "no column that is known here; it has `loss`"),
        (b'{"name": "x"}\n', "holds no numbers"),
        (b"{{{\n{{{\n", "is not valid JSON"),
        (b"[1, 2]", "holds no numbers"),
        (b"iter,reward_mean,kl_ref\n", "holds no numbers"),
        (b'{"rollout/kl_ref": null, "run/iteration": 0}\n', "no column that is known"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_sentence(tmp_path, content, said):
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_run(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["5", "null", "[[1]]", '{"log_history": 3}', "{}", "[", ""])
def test_json_of_another_form_is_refused(tmp_path, content):
    path = tmp_path / "state.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"state\.json"):
        load_run(path)


def test_places_without_a_log(tmp_path):
    with pytest.raises(DataError, match="is not there"):
        load_run(tmp_path / ("x" * 300))
    with pytest.raises(DataError, match="is not there"):
        load_run(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no log of a run"):
        load_run(tmp_path)


# Columns of the user's own


def test_own_columns_are_mapped_by_logged_name_or_field(tmp_path):
    path = csv_file(tmp_path, "3,0.5,9", head="step,my_kl,len")
    run = load_run(path, pairs={"my_kl": "rollout/kl_ref", "len": "response_length_mean"})
    assert run.rows[0].kl_ref == 0.5
    assert run.rows[0].response_length_mean == 9.0
    assert run.unknown == []


def test_own_columns_that_are_wrong_say_what_may_be_meant(tmp_path):
    path = csv_file(tmp_path, "3,0.5,9", head="step,my_kl,len")
    with pytest.raises(ConfigError, match=r"Did you mean `rollout/kl_ref`\?"):
        load_run(path, pairs={"my_kl": "rollout/kl_reff"})
    with pytest.raises(ConfigError, match=r"in a column `my_k`. Did you mean `my_kl`\?"):
        load_run(path, pairs={"my_k": "rollout/kl_ref"})


def test_own_columns_win_over_others_of_the_same_meaning(tmp_path):
    for head in ("step,mine,rollout/kl_ref", "step,rollout/kl_ref,mine"):
        values = "0,1,2" if head.endswith("ref") else "0,2,1"
        run = load_run(csv_file(tmp_path, values, head=head), pairs={"mine": "kl_ref"})
        assert run.rows[0].kl_ref == 1.0
    path = csv_file(tmp_path, "0,1,1,0,2,8,9", head=f"{HEAD},mine,mean")
    run = load_run(path, pairs={"mine": "kl_ref", "mean": "score_mean"})
    assert (run.rows[0].kl_ref, run.rows[0].score_mean, run.rows[0].raw_score_mean) == (8, 9, 1)
    assert run.unknown == []
    with pytest.raises(ConfigError, match="columns `mine` and `mean` are both given as `rollout/k"):
        load_run(path, pairs={"mine": "kl_ref", "mean": "rollout/kl_ref"})


def test_a_column_beside_a_known_framework_adds_to_it(tmp_path):
    path = csv_file(tmp_path, "0,1,1,0,2,64", head=f"{HEAD},n")
    run = load_run(path, pairs={"n": "rollout/num_responses"})
    assert run.rows[0].num_responses == 64.0
    assert run.rows[0].entropy == 2.0
