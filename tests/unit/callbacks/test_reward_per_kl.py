import math

import pytest

from ppo_lightning.callbacks import RewardPerKL
from ppo_lightning.errors import ConfigError
from tests.helpers.controllers import StandIn


def rows(pairs, spread=1.0):
    return [{"kl_ref": kl, "score_mean": score, "score_std": spread} for kl, score in pairs]


RISING = rows([(0.0, 0.0), (1.0, 0.5), (2.0, 1.0)])
FLATTER = rows([(3.0, 1.1), (4.0, 1.2)])
FLAT = rows([(0.0, 0.3), (1.0, 0.3), (2.0, 0.3)])


def run(kl=0.1, **settings):
    return StandIn(RewardPerKL(**{"window": 3} | settings), kl={"coef": kl}).start()


def test_a_brake_where_reward_per_kl_fades():
    module = run(factor=1.5)
    module.run(RISING)  # 0.5 a nat
    assert module.controls["kl_coef"] == 0.1
    module.run(FLATTER[:1], first=3)  # 0.3 a nat: more than half of it
    assert module.controls["kl_coef"] == 0.1
    module.run(FLATTER[1:], first=4)  # 0.1 a nat
    assert module.controls["kl_coef"] == pytest.approx(0.15)
    assert module.controls["actor_lr_factor"] == 1.0
    [entry] = module.controls.journal
    assert entry["reason"] == (
        "KL rose by 2 nats per response, the score by 0.2: 0.1 per nat, once 0.5"
    )


@pytest.mark.parametrize(
    ("on_stall", "coef", "rate"), [("lower_coef", 0.05, 1.0), ("lower_actor_lr", 0.1, 0.5)]
)
def test_kl_that_never_paid_changes_the_course(on_stall, coef, rate):
    module = run(factor=2.0, on_stall=on_stall)
    module.run(FLAT)
    assert module.controls["kl_coef"] == coef
    assert module.controls["actor_lr_factor"] == rate


def test_a_gain_within_the_noise_of_the_scores_is_none():
    small = [(0.0, 0.0), (1.0, 0.05), (2.0, 0.1)]
    noisy, clear = run(), run()
    noisy.run(rows(small, spread=1.0))
    clear.run(rows(small, spread=0.1))
    assert noisy.controls["kl_coef"] < 0.1
    assert clear.controls["kl_coef"] == 0.1


def test_nothing_is_said_while_the_kl_does_not_grow():
    for pairs in ([(2.0, 0.0), (2.0, 0.0), (2.0, 0.0)], [(4.0, 1.0), (3.0, 0.5), (2.0, 0.0)]):
        module = run()
        module.run(rows(pairs))
        assert module.controls.journal == []


def test_after_a_change_a_whole_window_is_waited_for():
    module = run(factor=2.0)
    module.run(rows([(float(i), 0.0) for i in range(9)]))
    assert [entry["iteration"] for entry in module.controls.journal] == [2, 5, 8]
    eager = run(factor=2.0, cooldown=0)
    eager.run(rows([(float(i), 0.0) for i in range(5)]))
    assert [entry["iteration"] for entry in eager.controls.journal] == [2, 3, 4]


def test_bounds_hold_both_ways():
    down = run(cooldown=0, factor=10.0, min_coef=0.02)
    down.run(rows([(float(i), 0.0) for i in range(6)]))
    assert down.controls["kl_coef"] == 0.02
    slow = run(cooldown=0, factor=10.0, on_stall="lower_actor_lr", min_lr_factor=0.05)
    slow.run(rows([(float(i), 0.0) for i in range(6)]))
    assert slow.controls["actor_lr_factor"] == 0.05
    up = run(cooldown=0, factor=10.0, max_coef=0.5)
    up.run(RISING + rows([(3.0 + i, 1.0) for i in range(5)]))
    assert up.controls["kl_coef"] == 0.5


@pytest.mark.parametrize("lost", ["kl_ref", "score_mean", "score_std"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_an_iteration_without_numbers_is_left_out(lost, value):
    module = run(factor=2.0)
    module.run([*FLAT[:2], FLAT[2] | {lost: value}])
    assert module.controls["kl_coef"] == 0.1
    module.run(FLAT[2:], first=3)
    assert module.controls["kl_coef"] == 0.05


def test_t53_the_window_survives_a_resume_at_any_iteration():
    course = RISING + FLATTER + rows([(5.0, 1.2), (6.0, 1.2), (7.0, 1.2), (8.0, 1.2)])
    whole = run()
    whole.run(course)
    assert len(whole.controls.journal) == 2
    for after in range(1, len(course)):
        stopped = run()
        stopped.run(course[:after])
        again = stopped.resumed(RewardPerKL(window=3))
        again.run(course[after:], first=after)
        assert again.controls.state_dict() == whole.controls.state_dict()


def test_a_saved_window_does_not_change_any_more():
    module = run()
    module.run(RISING[:1])
    [callback] = module.trainer.callbacks
    saved = callback.state_dict()
    module.run(RISING[1:], first=1)
    assert saved == {"points": [[0.0, 0.0, 1.0]], "best": None, "wait": 0}


@pytest.mark.parametrize("normalize", ["batch", "group", "running", "ema"])
def test_scores_without_a_lasting_scale_are_refused(normalize):
    with pytest.raises(ConfigError, match=f"normalize: {normalize}`.*use `reference` or `none`"):
        StandIn(RewardPerKL(), normalize=normalize).start()
    StandIn(RewardPerKL(), normalize="reference").start()


def test_a_coefficient_of_0_is_refused():
    with pytest.raises(ConfigError, match=r"`kl\.coef` is 0 and would stay 0"):
        run(kl=0.0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("window", 2),
        ("factor", 1.0),
        ("factor", math.nan),
        ("slope_share", 1.5),
        ("min_kl_growth", 0.0),
        ("min_gain", -0.1),
        ("on_stall", "stop"),
        ("min_coef", 0.0),
        ("max_coef", 0.0),
        ("min_lr_factor", 0.0),
        ("min_lr_factor", 2.0),
        ("cooldown", -1),
    ],
)
def test_senseless_arguments_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        RewardPerKL(**{argument: value})
