from ppo_lightning.cli.tables import scores_table


def test_ways_of_answering_are_columns():
    text = scores_table(
        {
            "test/greedy/score": 0.5,
            "test/reference/greedy/score": 0.25,
            "test/greedy/kl_ref": 1.0,
            "own_metric": 3.0,
        }
    )
    assert [line.split() for line in text.splitlines()] == [
        ["greedy", "reference/greedy"],
        ["score", "0.5", "0.25"],
        ["kl_ref", "1"],
        ["own_metric", "3"],
    ]


def test_nothing_measured_is_no_error():
    assert scores_table({}) == ""
