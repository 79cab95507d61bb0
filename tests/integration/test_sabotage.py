"""Each mechanism against the fault it is for: ill without it, well with it.

Short forms of ``experiments/stability``: fewer and smaller iterations, and a higher rate where the
fault takes its time. Both sides of a pair are run, so a mechanism that does nothing turns its test
red, and so does a fault that does no harm.
"""

import pytest

from experiments.stability.outcome import fit
from experiments.stability.overlay import LR, Overlay
from experiments.stability.scenarios import make_scenarios

FAULT_AT = 1
SCENARIOS = make_scenarios(FAULT_AT)


@pytest.fixture
def run(tmp_path):
    def made(name, variant, iterations, *, speed=1.0, prompts=32):
        overlays = SCENARIOS[name].overlays(variant)
        if speed > 1:
            settings = {"actor": {"lr": speed * LR}, "buffer": {"num_prompts": prompts}}
            overlays.append(Overlay(settings=settings))
        return fit(tmp_path, overlays, seed=0, iterations=iterations, num_held_out=4)

    return made


def kl(made):
    """KL of held-out answers after the last iteration."""
    return made.stats[-1].val_sampled.kl_ref


def test_a_rate_far_too_high_is_cut(run):
    assert kl(run("actor_rate", "without", 2)) > 10
    treated = run("actor_rate", "rollback", 6)
    assert treated.rollbacks == 2
    assert treated.stats[-1].lr_actor < 2 * LR
    assert kl(treated) < 5


# A rollback that raises the penalty is in test_rollback.py too; this one takes twenty iterations.
@pytest.mark.slow
def test_a_reward_with_a_hole_is_left_before_the_policy_is_far_away(run):
    assert kl(run("hacking", "without", 10, speed=2, prompts=48)) > 10
    treated = run("hacking", "go_on", 10, speed=2, prompts=48)
    assert treated.rollbacks >= 1
    assert treated.stats[-1].kl_coef >= 0.4, "it began without a penalty"
    assert kl(treated) < 8


# The same mechanism as against the rate above, in sixteen iterations.
@pytest.mark.slow
def test_a_policy_that_runs_away_is_called_back(run):
    assert kl(run("kl_runaway", "without", 8, speed=3, prompts=48)) > 12
    treated = run("kl_runaway", "rollback", 8, speed=3, prompts=48)
    assert treated.rollbacks >= 1
    assert kl(treated) < 9


# The law is in test_entropy_target.py and a run of it in test_controllers.py; this is the longest.
@pytest.mark.slow
def test_a_falling_entropy_is_held_up(run):
    untreated = run("entropy_collapse", "without", 13, speed=1.5, prompts=48)
    treated = run("entropy_collapse", "target", 13, speed=1.5, prompts=48)
    assert untreated.stats[-1].entropy < 0.25 * untreated.stats[0].entropy
    assert treated.stats[-1].entropy > 0.35 * treated.stats[0].entropy


def test_a_small_buffer_is_not_overfitted_and_grows(run):
    untreated = run("overfit_buffer", "without", 2)
    assert untreated.stats[-1].kl_old > 0.5
    assert untreated.stats[-1].num_responses == 8
    treated = run("overfit_buffer", "scheduler", 5)
    assert all(s.kl_old < 0.1 for s in treated.stats)
    assert treated.stats[-1].num_responses > 8


def test_a_bad_value_head_is_mended_before_the_actor_listens(run):
    [untreated] = run("value_head", "without", 1).stats
    *resting, first = run("value_head", "warmup", 9).stats
    assert untreated.advantage_abs_max > 200
    assert first.advantage_abs_max < 60
    assert [s.val_sampled.kl_ref for s in resting] == pytest.approx([0] * 8, abs=1e-4)
    assert first.val_sampled.kl_ref != pytest.approx(0, abs=1e-4)


def test_scores_of_another_scale_leave_the_penalty_its_weight(run):
    untreated = run("reward_scale", "without", 6, speed=3, prompts=48)
    treated = run("reward_scale", "normalize", 6, speed=3, prompts=48)
    assert untreated.stats[-1].value_loss > 1e6
    assert treated.stats[-1].value_loss < 10
    assert kl(treated) < 0.85 * kl(untreated)


def test_one_absurd_score_is_clipped(run):
    untreated = run("reward_outlier", "without", 2).stats[FAULT_AT]
    treated = run("reward_outlier", "clip", 2).stats[FAULT_AT]
    assert untreated.advantage_abs_max > 1e5
    assert untreated.value_loss > 1e6
    assert treated.advantage_abs_max < 20
    assert treated.value_loss < 20


@pytest.mark.parametrize("name", ["reward_nan", "reward_nan_word"])
def test_scores_that_are_no_numbers_cost_their_responses_alone(run, name):
    assert not run(name, "without", 1).finite
    treated = run(name, "drop", 2)
    assert treated.finite
    assert all(s.dropped_responses > 0 for s in treated.stats)
    assert all(s.steps_taken == 4 for s in treated.stats)


def test_a_gradient_that_is_not_finite_costs_its_step_alone(run):
    assert not run("nan_gradient", "without", 2).finite
    treated = run("nan_gradient", "guard", 2)
    assert treated.finite
    assert [s.steps_skipped_nonfinite for s in treated.stats] == [0, 1]


@pytest.mark.filterwarnings("ignore:An iteration took no optimiser step")
def test_a_weight_that_is_not_finite_is_restored(run):
    untreated = run("nan_weight", "without", 3)
    assert not untreated.finite
    treated = run("nan_weight", "rollback", 3)
    assert treated.rollbacks == 1
    assert treated.finite
    assert treated.stats[-1].steps_taken == 4
