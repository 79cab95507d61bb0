import logging
import math
from types import SimpleNamespace

import pytest

from ppo_lightning.callbacks import MaxKL
from ppo_lightning.errors import ConfigError
from tests.helpers.controllers import StandIn

ABOVE = {"kl_ref": 9.0, "kl_ref_per_token": 0.2}


def test_stop_update_sets_the_bounds_of_the_module():
    module = StandIn(MaxKL(max_kl_ref=6.0, max_kl_ref_per_token=0.1)).start()
    assert module.controls["max_kl_ref"] == 6.0
    assert module.controls["max_kl_ref_per_token"] == 0.1
    module.end_iteration(0, **ABOVE)
    assert module.verdicts == []
    assert not module.trainer.should_stop


def test_a_bound_that_is_not_given_is_not_set():
    module = StandIn(MaxKL(max_kl_ref=6.0)).start()
    assert module.controls["max_kl_ref_per_token"] == math.inf


def test_a_resumed_run_sets_the_same_and_writes_nothing_new():
    module = StandIn(MaxKL(max_kl_ref=6.0)).start()
    again = module.resumed(MaxKL(max_kl_ref=6.0))
    assert again.controls.state_dict() == module.controls.state_dict()
    assert module.resumed(MaxKL(max_kl_ref=4.0)).controls["max_kl_ref"] == 4.0


def test_stop_run_ends_the_run_and_says_why(caplog):
    module = StandIn(MaxKL(max_kl_ref=6.0, action="stop_run")).start()
    assert module.controls["max_kl_ref"] == math.inf
    with caplog.at_level(logging.INFO):
        module.end_iteration(2, kl_ref=6.0)  # on the bound
        assert not module.trainer.should_stop
        module.end_iteration(3, **ABOVE)
    assert module.trainer.should_stop
    [record] = caplog.records
    assert record.message == (
        "MaxKL ends the run after iteration 3: KL 9 above `max_kl_ref` 6 nats per response."
    )


def test_either_bound_is_enough():
    bounds = {"max_kl_ref": 10.0, "max_kl_ref_per_token": 0.1}
    module = StandIn(MaxKL(**bounds, action="stop_run")).start()
    module.end_iteration(0, kl_ref=9.0, kl_ref_per_token=0.05)
    assert not module.trainer.should_stop
    module.end_iteration(1, **ABOVE)
    assert module.trainer.should_stop


@pytest.mark.parametrize("kl", [math.nan, None])
def test_what_was_not_measured_is_not_above(kl):
    module = StandIn(MaxKL(max_kl_ref=6.0, action="stop_run")).start()
    module.end_iteration(0, kl_ref=kl)
    assert not module.trainer.should_stop


def test_an_earlier_iteration_is_not_judged_again():
    module = StandIn(MaxKL(max_kl_ref=6.0, action="stop_run")).start()
    module.end_iteration(0, **ABOVE)
    module.trainer.should_stop = False
    module.controls.iteration = 1
    module.trainer.callbacks[0].on_train_epoch_end(module.trainer, module)
    assert not module.trainer.should_stop


def test_rollback_reports_the_illness():
    treating = SimpleNamespace(treats=lambda illness: illness == "kl_runaway")
    module = StandIn(
        MaxKL(max_kl_ref=6.0, max_kl_ref_per_token=0.1, action="rollback"), treating
    ).start()
    module.end_iteration(4, **ABOVE)
    [verdict] = module.verdicts
    assert (verdict.illness, verdict.iteration, verdict.source) == ("kl_runaway", 4, "MaxKL")
    assert verdict.evidence == (
        "KL 9 above `max_kl_ref` 6 nats per response; "
        "KL 0.2 above `max_kl_ref_per_token` 0.1 nats per token."
    )
    assert not module.trainer.should_stop


def test_rollback_without_anyone_to_do_it_is_refused():
    for others in (
        [],
        [SimpleNamespace()],
        [SimpleNamespace(treats=lambda illness: illness == "other")],
    ):
        with pytest.raises(ConfigError, match=r"needs a callback that goes back.*CheckpointRollb"):
            StandIn(MaxKL(max_kl_ref=6.0, action="rollback"), *others).start()


def test_one_bound_has_one_home():
    with pytest.raises(ConfigError, match=r"`kl\.max_kl_ref` \(5\.0\) and `max_kl_ref` of MaxKL"):
        StandIn(MaxKL(max_kl_ref=6.0), kl={"max_kl_ref": 5.0}).start()
    stop_run = MaxKL(max_kl_ref=6.0, action="stop_run")
    module = StandIn(stop_run, kl={"max_kl_ref": 5.0}).start()  # two bounds, two actions
    assert module.controls["max_kl_ref"] == 5.0


def test_two_may_act_differently_but_not_set_one_bound_twice():
    outer = MaxKL(max_kl_ref=9.0, action="stop_run")
    StandIn(MaxKL(max_kl_ref=6.0), outer, MaxKL(max_kl_ref_per_token=0.1)).start()
    with pytest.raises(ConfigError, match="MaxKL twice, and both steer `max_kl_ref`"):
        StandIn(MaxKL(max_kl_ref=6.0), MaxKL(max_kl_ref=5.0)).start()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "`max_kl_ref` or `max_kl_ref_per_token`"),
        ({"max_kl_ref": 0.0}, "`max_kl_ref`"),
        ({"max_kl_ref": math.inf}, "`max_kl_ref`"),
        ({"max_kl_ref_per_token": -0.1}, "`max_kl_ref_per_token`"),
        ({"max_kl_ref": 6.0, "action": "stop"}, "`action` must be one of stop_update, stop_run"),
    ],
)
def test_senseless_arguments_are_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        MaxKL(**arguments)
