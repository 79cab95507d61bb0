"""The one place for what changes during a run."""

import itertools
import json
from math import inf

import pytest

from ppo_lightning.configs import KLConfig, PPOConfig, SamplingConfig
from ppo_lightning.errors import ConfigError
from ppo_lightning.modules.controls import Controls, Dial, Request, merged_value, ppo_dials

CONTROLLER = Request(source="AdaptiveKL", dial="kl_coef", value=1.0)
DOCTOR = Request(source="Doctor", dial="kl_coef", factor=4.0, layer="doctor")
SAFETY = Request(source="MaxKL", dial="kl_coef", factor=0.5, layer="safety")


def controls(**dials):
    return Controls({"kl_coef": Dial(value=0.05), **dials})


@pytest.mark.parametrize("order", [*itertools.permutations([CONTROLLER, DOCTOR, SAFETY])])
def test_layers_are_applied_in_their_own_order_whoever_asks_first(order):
    dials = controls()
    for request in order:
        dials.request(request)
    assert dials["kl_coef"] == 2.0


def test_a_value_of_a_later_layer_replaces_what_was_before():
    dials = controls()
    for request in (Request(source="b", dial="kl_coef", value=0.3, layer="safety"), DOCTOR):
        dials.request(request)
    assert dials["kl_coef"] == 0.3


def test_bounds_hold_whatever_is_asked():
    dial = Dial(value=1.0, low=0.5, high=2.0)
    for factor, bounded in ((9.0, 2.0), (0.0, 0.5), (1.5, 1.5)):
        request = Request(source="s", dial="d", factor=factor)
        assert merged_value(dial, [request], iteration=0) == bounded


@pytest.mark.parametrize(
    ("dial", "value"),
    [("clip_range", 1e-6), ("clip_range", 5e-4), ("clip_range", 0.9995), ("penalty_coef", 1e-6)],
)
def test_what_a_config_may_say_is_what_the_run_starts_with(dial, value):
    assert Controls(ppo_dials(PPOConfig(**{dial: value}), KLConfig()))[dial] == value


@pytest.mark.parametrize(
    ("configured", "engine", "bounds"),
    [
        (0.8, (0.0, inf), (0.4, 1.6)),
        (0.8, (0.5, 1.0), (0.5, 1.0)),
        (0.8, (0.8, 0.8), (0.8, 0.8)),  # it can do no other
        (0.8, (0.9, 1.0), (0.8, 1.0)),  # what is configured is the engine's to refuse
        (1, (0.01, 2.0), (0.5, 2.0)),
    ],
)
def test_the_temperature_stays_within_its_factors_and_what_the_engine_can_do(
    configured, engine, bounds
):
    sampling = SamplingConfig(temperature=configured)
    dials = Controls(ppo_dials(PPOConfig(), KLConfig(), sampling, temperatures=engine))
    assert dials["temperature"] == configured
    for asked, bound in zip((0.0, inf), bounds, strict=True):
        assert dials.request(Request(source="s", dial="temperature", value=asked)) == bound


def test_a_request_holds_through_its_last_iteration():
    dials = controls()
    dials.iteration = 3
    dials.request(Request(source="s", dial="kl_coef", value=9.0, until=5))
    found = []
    for iteration in (4, 5, 6):
        dials.iteration = iteration
        found.append(dials["kl_coef"])
    assert found == [9.0, 9.0, 0.05]


def test_a_later_request_of_one_source_replaces_its_earlier_one():
    dials = controls()
    dials.request(Request(source="s", dial="kl_coef", factor=2.0))
    dials.request(Request(source="s", dial="kl_coef", factor=2.0))
    assert dials["kl_coef"] == 0.1
    assert dials.withdraw("s", "kl_coef") == 0.05
    assert dials.withdraw("s", "kl_coef") == 0.05


def test_the_journal_tells_who_changed_what_and_when():
    dials = controls()
    dials.iteration = 2
    dials.request(Request(source="AdaptiveKL", dial="kl_coef", value=0.1, reason="KL 12 > 6"))
    dials.request(Request(source="Idle", dial="kl_coef", factor=1.0))  # changes nothing
    dials.withdraw("AdaptiveKL", "kl_coef")
    common = {"iteration": 2, "source": "AdaptiveKL", "dial": "kl_coef"}
    assert dials.journal == [
        {**common, "before": 0.05, "after": 0.1, "reason": "KL 12 > 6"},
        {**common, "before": 0.1, "after": 0.05, "reason": "withdrawn"},
    ]


def test_a_dial_has_one_law():
    dials = controls()
    dials.claim("kl_coef", "AdaptiveKL")
    dials.claim("kl_coef", "AdaptiveKL")
    with pytest.raises(ConfigError, match="both AdaptiveKL and RewardPerKL"):
        dials.claim("kl_coef", "RewardPerKL")


def test_unknown_dials_name_the_nearest_and_all():
    dials = controls(clip_range=Dial(value=0.2))
    for use in (
        lambda: dials["klcoef"],
        lambda: dials.claim("klcoef", "s"),
        lambda: dials.request(Request(source="s", dial="klcoef", value=1.0)),
    ):
        with pytest.raises(ConfigError, match=r"did you mean `kl_coef`\?.*kl_coef, clip_range"):
            use()
    with pytest.raises(ConfigError, match="zzz") as caught:
        dials["zzz"]
    assert "None" not in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"value": 1.0, "factor": 2.0}])
def test_a_request_takes_a_value_or_a_factor(given):
    with pytest.raises(ConfigError, match="`kl_coef` takes either `value` or `factor`"):
        Request(source="s", dial="kl_coef", **given)


def test_state_survives_a_resume_and_configured_values_are_those_of_the_new_run():
    dials = controls()
    dials.iteration = 4
    dials.request(DOCTOR)
    dials.request(Request(source="s", dial="kl_coef", factor=10.0, until=4))
    state = json.loads(json.dumps(dials.state_dict()))  # plain containers only
    resumed = Controls({"kl_coef": Dial(value=0.1)})
    resumed.load_state_dict(state)
    assert resumed["kl_coef"] == 4.0  # 0.1 x 4 x 10
    assert resumed.journal == dials.journal
    resumed.iteration += 1
    assert resumed["kl_coef"] == 0.4
    assert resumed.state_dict()["requests"] == state["requests"]


def test_changes_of_what_is_no_dial_are_in_the_journal_too():
    controls = Controls({})
    controls.iteration = 3
    controls.note("Doctor", "weights", before=2, after=-1, reason="ill")
    assert controls.journal == [
        {
            "iteration": 3,
            "source": "Doctor",
            "dial": "weights",
            "before": 2,
            "after": -1,
            "reason": "ill",
        }
    ]


def test_what_nobody_would_turn_back_is_told():
    controls = Controls({"kl_coef": Dial(value=0.1), "ent_coef": Dial(value=0.5)})
    for source, dial, layer, until in (
        ("Doctor", "kl_coef", "doctor", None),
        ("Guard", "ent_coef", "safety", 3),
        ("Law", "ent_coef", "controller", None),
    ):
        controls.request(Request(source=source, dial=dial, factor=4.0, layer=layer, until=until))
    assert [controls.asked_by(source) for source in ("Doctor", "Guard")] == [["kl_coef"], []]
    doctor, guard = controls.left_over({"Law"})
    assert "Doctor turned before: `kl_coef` 0.1 → 0.4 (" in doctor
    assert "`policy: observe`" in doctor
    assert 'controls.withdraw("Guard", DIAL)' in guard
    assert "observe" not in guard
    controls.iteration = 3  # the last that the guard's holds for; the next one is begun
    assert controls.left_over(()) == [doctor]
    assert controls.left_over({"Doctor"}) == []
