import math

import pytest

from ppo_lightning.callbacks import EntropyTarget
from ppo_lightning.errors import ConfigError
from tests.helpers.controllers import StandIn


def run(ent_coef=0.0, **settings):
    callback = EntropyTarget(**{"target": 2.0, "rate": 0.01} | settings)
    return StandIn(callback, ppo={"ent_coef": ent_coef}).start()


def test_the_bonus_grows_below_the_target_and_comes_back_to_what_was_configured():
    module = run(ent_coef=0.002)
    found = []
    for iteration, entropy in enumerate([3.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.0]):
        module.end_iteration(iteration, entropy=entropy)
        found.append(module.controls["ent_coef"])
    assert found == pytest.approx([0.002, 0.007, 0.0095, 0.0095, 0.007, 0.002, 0.002])
    reasons = [entry["reason"] for entry in module.controls.journal]
    assert reasons[0] == "entropy 1 below target 2 nats per token"
    assert reasons[-1] == "entropy 3 above target 2 nats per token"


def test_a_share_of_the_first_entropy():
    module = run(target=None, relative=0.5)
    module.run([{"entropy": math.nan}, {"entropy": 4.0}, {"entropy": 2.0}])
    assert module.controls["ent_coef"] == 0.0
    module.end_iteration(3, entropy=1.0)
    assert module.controls["ent_coef"] == pytest.approx(0.005)


def test_the_largest_bonus_is_left_at_once():
    module = run(max_coef=0.02)
    module.run([{"entropy": 0.0}] * 50)
    assert module.controls["ent_coef"] == 0.02
    module.end_iteration(50, entropy=3.0)
    assert module.controls["ent_coef"] == pytest.approx(0.015)


def test_an_entropy_that_yields_to_the_bonus_settles_at_the_target():
    module = run(target=2.0, rate=0.002)
    for iteration in range(300):
        entropy = 1.0 + 50 * module.controls["ent_coef"]
        module.end_iteration(iteration, entropy=entropy)
    assert entropy == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("entropy", [None, math.nan, math.inf])
def test_what_was_not_measured_moves_nothing(entropy):
    module = run(ent_coef=0.002)
    module.run([{"entropy": 1.0}, {"entropy": entropy}])
    assert module.controls["ent_coef"] == pytest.approx(0.007)


def test_a_policy_without_any_entropy_has_no_share_of_it():
    module = run(target=None, relative=0.5)
    module.run([{"entropy": 0.0}] * 2)
    assert module.controls["ent_coef"] == 0.0


def test_t53_the_first_entropy_survives_a_resume():
    course = [{"entropy": e} for e in (4.0, 3.0, 1.5, 1.0, 1.2)]
    settings = {"target": None, "relative": 0.5}
    whole = run(**settings)
    whole.run(course)
    for after in range(1, 5):
        stopped = run(**settings)
        stopped.run(course[:after])
        again = stopped.resumed(EntropyTarget(relative=0.5, rate=0.01))
        again.run(course[after:], first=after)
        assert again.controls.state_dict() == whole.controls.state_dict()
    assert whole.controls["ent_coef"] > 0.01


def test_a_configured_bonus_above_the_largest_is_refused():
    with pytest.raises(ConfigError, match=r"`ppo\.ent_coef` \(0\.1\).*`max_coef`"):
        run(ent_coef=0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "`target`.*`relative`"),
        ({"target": 1.0, "relative": 0.5}, "`target`.*`relative`"),
        ({"target": 0.0}, "`target`"),
        ({"relative": 0.0}, "`relative`"),
        ({"relative": 1.1}, "`relative`"),
        ({"relative": math.nan}, "`relative`"),
        ({"target": 1.0, "rate": 0.0}, "`rate`"),
        ({"target": 1.0, "max_coef": 0.0}, "`max_coef`"),
    ],
)
def test_senseless_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        EntropyTarget(**arguments)
