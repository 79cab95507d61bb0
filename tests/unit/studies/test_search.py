import sys

import pytest

from ppo_lightning.errors import ConfigError
from ppo_lightning.studies import Range, Search, Variation, ends_of, require_optuna, run_search

VARIED = [
    Range("model.actor.lr", 1e-6, 1e-4, log=True),
    Range("model.ppo.num_update_epochs", 1, 4),
    Variation("model.sampling.stop_token_ids", ([1], [2, 3])),
]


def test_the_ends_and_values_that_are_tried_out_first():
    assert ends_of(VARIED) == [
        {"model.actor.lr": 1e-6},
        {"model.actor.lr": 1e-4},
        {"model.ppo.num_update_epochs": 1},
        {"model.ppo.num_update_epochs": 4},
        {"model.sampling.stop_token_ids": [1]},
        {"model.sampling.stop_token_ids": [2, 3]},
    ]


def test_without_optuna_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install \"ppo-lightning\[search\]\""):
        require_optuna()


def quality(settings):
    return -abs(settings["model.actor.lr"] - 1e-5) + settings["model.ppo.num_update_epochs"]


def run_all(trials):
    return {trial.number: quality(trial.settings) for trial in trials}


def made(out, *steps, batch=1):
    """Settings of all trials of a search that is taken up anew for each number of trials."""
    for num_trials in steps:
        run_search(Search(out, VARIED, seed=3), num_trials, batch, run_all)
    return [trial.settings for trial in Search(out, VARIED, seed=3).trials()]


def new(folder):
    folder.mkdir()
    return folder


class TestWithOptuna:
    @pytest.fixture(autouse=True)
    def _optuna(self):
        pytest.importorskip("optuna")

    def test_proposals_lie_in_the_ranges(self, tmp_path):
        found = made(tmp_path, 16)
        assert len(found) == 16
        assert all(1e-6 <= one["model.actor.lr"] <= 1e-4 for one in found)
        assert {one["model.ppo.num_update_epochs"] for one in found} == {1, 2, 3, 4}
        lists = [one["model.sampling.stop_token_ids"] for one in found]
        assert [1] in lists
        assert [2, 3] in lists

    def test_a_log_scale_counts_factors(self, tmp_path):
        rates = [one["model.actor.lr"] for one in made(tmp_path, 10)]  # random ones, before TPE's
        assert 2 <= sum(rate < 1e-5 for rate in rates) <= 8

    def test_a_search_that_was_cut_off_is_the_one_that_was_not(self, tmp_path):
        whole = made(new(tmp_path / "a"), 14)
        assert made(new(tmp_path / "b"), 3, 5, 14) == whole
        assert len({one["model.actor.lr"] for one in whole}) == 14

    def test_an_open_trial_is_run_again(self, tmp_path):
        def cut_off(trials):
            seen.extend(trial.settings for trial in trials)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return run_all(trials)

        seen = []
        with pytest.raises(KeyboardInterrupt):
            run_search(Search(tmp_path, VARIED), 5, 1, cut_off)
        before = list(seen)
        run_search(Search(tmp_path, VARIED), 5, 1, cut_off)
        assert seen[3] == before[2]
        assert len(seen) == 6
        assert not any(trial.is_open for trial in Search(tmp_path, VARIED).trials())

    @pytest.mark.parametrize("level", [None, float("nan"), float("inf")])
    def test_a_trial_that_failed_is_no_success(self, tmp_path, level):
        run_search(Search(tmp_path, VARIED), 2, 1, lambda trials: {t.number: level for t in trials})
        search = Search(tmp_path, VARIED)
        assert [trial.is_open for trial in search.trials()] == [False, False]
        run_search(search, 2, 1, run_all)  # nothing is left to do
        assert len(search.trials()) == 2

    def test_several_at_a_time(self, tmp_path):
        sizes = []

        def run(trials):
            sizes.append(len(trials))
            return run_all(trials)

        run_search(Search(tmp_path, VARIED), 7, 3, run)
        assert sizes == [3, 3, 1]

    def test_it_finds_what_is_good(self, tmp_path):
        found = made(tmp_path, 25)
        late = [one["model.ppo.num_update_epochs"] for one in found[15:]]
        assert late.count(4) > len(late) / 2
