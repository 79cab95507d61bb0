import math
from types import SimpleNamespace

import pytest

from ppo_lightning.callbacks import AdaptiveKL
from ppo_lightning.configs import BufferConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules import Request
from tests.helpers.controllers import StandIn

MEASURED = {"kl_ref": 9.0, "kl_ref_per_token": 0.1, "num_responses": 256.0}


def run(**kl):
    return StandIn(AdaptiveKL(target=6.0, horizon=10_000), kl={"coef": 0.1} | kl).start()


def test_t26_it_reads_the_kl_of_a_response():
    module = run()
    module.end_iteration(0, **MEASURED)
    assert module.controls["kl_coef"] == pytest.approx(0.100512, rel=1e-9)
    [entry] = module.controls.journal
    assert entry["source"] == "AdaptiveKL"
    assert entry["reason"] == "KL 9 above target 6 nats per response"


def test_steps_follow_one_another():
    module = run()
    module.run([MEASURED, MEASURED | {"kl_ref": 3.0}])
    assert module.controls["kl_coef"] == pytest.approx(0.1 * 1.00512 * 0.99488, rel=1e-9)
    assert "below" in module.controls.journal[-1]["reason"]


@pytest.mark.parametrize(
    "change",
    [{"kl_ref": math.nan}, {"kl_ref": math.inf}, {"kl_ref": None}, {"num_responses": None}],
)
def test_what_was_not_measured_moves_nothing(change):
    module = run()
    module.end_iteration(0, **(MEASURED | change))
    assert module.controls["kl_coef"] == 0.1


def test_the_record_of_an_earlier_iteration_moves_nothing():
    module = run()
    module.end_iteration(0, **MEASURED)
    before = module.controls["kl_coef"]
    module.controls.iteration = 1  # in which nothing was measured
    module.trainer.callbacks[0].on_train_epoch_end(module.trainer, module)
    module.iteration_stats = None
    module.trainer.callbacks[0].on_train_epoch_end(module.trainer, module)
    assert module.controls["kl_coef"] == before


def test_a_policy_at_rest_moves_nothing():
    module = run()
    module.controls.request(Request(source="s", dial="train_actor", value=0.0, until=0))
    module.end_iteration(0, **MEASURED)
    assert module.controls["kl_coef"] == 0.1
    module.end_iteration(1, **MEASURED)
    assert module.controls["kl_coef"] > 0.1


def test_a_policy_whose_every_step_was_stopped_or_skipped_moves_nothing():
    module = run()
    module.end_iteration(0, **MEASURED, actor_steps=0.0)
    assert module.controls["kl_coef"] == 0.1
    module.end_iteration(1, **MEASURED, actor_steps=1.0)
    assert module.controls["kl_coef"] > 0.1


def test_the_factor_of_a_doctor_is_not_taken_in_at_every_step():
    module = run()
    module.controls.request(Request(source="Doctor", dial="kl_coef", factor=2.0, layer="doctor"))
    for iteration in range(10):
        module.end_iteration(iteration, **(MEASURED | {"kl_ref": 6.0}))
    assert module.controls["kl_coef"] == pytest.approx(0.2)


def test_bounds_hold_and_are_left_at_once():
    module = StandIn(
        AdaptiveKL(horizon=1000, min_coef=0.04, max_coef=0.11), kl={"coef": 0.1}
    ).start()
    module.run([MEASURED] * 5)
    assert module.controls["kl_coef"] == 0.11
    module.end_iteration(5, **(MEASURED | {"kl_ref": 0.0}))
    assert module.controls["kl_coef"] == pytest.approx(0.11 * (1 - 0.2 * 0.256))
    module.run([MEASURED | {"kl_ref": 0.0}] * 40, first=6)
    assert module.controls["kl_coef"] == 0.04


def test_the_kl_of_a_policy_that_yields_to_beta_settles_at_the_target():
    module = StandIn(AdaptiveKL(target=6.0, horizon=2000), kl={"coef": 0.5}).start()
    for iteration in range(300):
        kl = 1.2 / module.controls["kl_coef"]
        module.end_iteration(iteration, kl_ref=kl, num_responses=256.0)
    assert kl == pytest.approx(6.0, rel=1e-3)


def test_a_buffer_that_has_grown_past_the_horizon_does_not_turn_the_sign():
    module = StandIn(
        AdaptiveKL(horizon=60),
        kl={"coef": 0.1},
        datamodule=SimpleNamespace(buffer=BufferConfig(num_prompts=256)),
    ).start()
    module.end_iteration(0, kl_ref=0.0, num_responses=4096.0)
    assert module.controls["kl_coef"] == pytest.approx(0.02)


def test_t53_beta_goes_on_where_it_was():
    whole, stopped = run(), run()
    whole.run([MEASURED] * 6)
    stopped.run([MEASURED] * 3)
    again = stopped.resumed(AdaptiveKL(target=6.0, horizon=10_000))
    again.run([MEASURED] * 3, first=3)
    assert again.controls.state_dict() == whole.controls.state_dict()


@pytest.mark.parametrize(
    ("settings", "kl", "named"),
    [
        ({}, {"coef": 0.0}, r"`kl\.coef` is 0 and would stay 0"),
        ({}, {"coef": 1e-5}, r"`kl\.coef` \(1e-05\) is outside.*`min_coef`"),
        ({"max_coef": 0.5}, {"coef": 0.6}, r"`kl\.coef` \(0\.6\) is outside.*`max_coef` 0\.5"),
        ({"horizon": 51.0}, {}, r"`horizon` must exceed 0\.2 times the 256 responses"),
    ],
)
def test_t26_settings_that_do_not_suit_the_run_are_refused(settings, kl, named):
    with pytest.raises(ConfigError, match=named):
        StandIn(AdaptiveKL(**settings), kl=kl).start()


def test_data_without_a_buffer_of_its_own_is_taken_as_it_is():
    StandIn(AdaptiveKL(horizon=51.0), datamodule=None).start()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("target", 0.0),
        ("target", -1.0),
        ("target", math.nan),
        ("horizon", 0.0),
        ("horizon", math.inf),
        ("min_coef", 0.0),
        ("min_coef", 11.0),
        ("max_coef", -1.0),
    ],
)
def test_t26_senseless_arguments_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        AdaptiveKL(**{argument: value})


def test_one_dial_has_one_law():
    from ppo_lightning.callbacks import RewardPerKL

    with pytest.raises(ConfigError, match="both AdaptiveKL and RewardPerKL"):
        StandIn(AdaptiveKL(), RewardPerKL()).start()
    with pytest.raises(ConfigError, match="AdaptiveKL twice, and both steer `kl_coef`"):
        StandIn(AdaptiveKL(), AdaptiveKL(target=3.0)).start()
