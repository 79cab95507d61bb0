"""Each mechanism against the fault it is for: the run is well with it, and ill without.

Short forms of ``experiments/stability``. Where a fault takes many iterations to show there, a higher
rate makes it show in a few here.
"""

import math

import pytest

from experiments.stability.outcome import fit
from experiments.stability.overlay import LR, Overlay
from experiments.stability.sabotage import EntropyPenalty
from experiments.stability.scenarios import make_scenarios

FAULT_AT = 1
SCENARIOS = make_scenarios(FAULT_AT)
FAST = Overlay(settings={"actor": {"lr": 3 * LR, "warmup": 0}})


@pytest.fixture
def run(tmp_path):
    def made(name, variant, iterations, *further):
        overlays = [*SCENARIOS[name].overlays(variant), *further]
        return fit(tmp_path, overlays, seed=0, iterations=iterations, num_held_out=4)

    return made


def kl(made):
    return [s.val_sampled.kl_ref for s in made.stats]


def gold(made):
    return [s.val_sampled.gold for s in made.stats]


def test_a_rate_far_too_high_is_rolled_back(run):
    assert max(kl(run("actor_rate", "without", 2))) > 10
    treated = run("actor_rate", "rollback", 5)
    assert treated.rollbacks == 2
    assert kl(treated)[-1] < 2
    assert treated.stats[-1].lr_actor < 2 * LR


def test_a_hacked_reward_is_left_in_time(run):
    assert kl(run("hacking", "without", 6, FAST))[-1] > 8
    stopped = run("hacking", "stop", 6, FAST)
    assert len(stopped.stats) < 6
    treated = run("hacking", "go_on", 6, FAST)
    assert treated.rollbacks >= 1
    assert treated.stats[-1].kl_coef > 0
    assert kl(treated)[-1] < 8
