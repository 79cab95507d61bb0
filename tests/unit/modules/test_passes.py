"""What each pass over the buffer trains."""

import pytest

from ppo_lightning.configs import PPOConfig
from ppo_lightning.modules.passes import num_passes, pass_plan

TOGETHER = PPOConfig(num_update_epochs=3, extra_critic_epochs=1)
IN_TURN = PPOConfig(num_update_epochs=2, update_order="in_turn", extra_critic_epochs=2)
WITHOUT_CRITIC = PPOConfig(num_update_epochs=2, advantage="rloo")


@pytest.mark.parametrize(
    ("ppo", "epochs", "train_actor", "expected"),
    [
        (TOGETHER, 3, True, "both both both critic"),
        (TOGETHER, 1, True, "both critic"),
        (TOGETHER, 3, False, "critic critic critic critic"),
        (IN_TURN, 2, True, "critic actor critic actor critic critic"),
        (IN_TURN, 1, True, "critic actor critic critic"),
        (IN_TURN, 2, False, "critic critic critic critic"),
        (WITHOUT_CRITIC, 2, True, "actor actor"),
        (WITHOUT_CRITIC, 2, False, ""),
    ],
)
def test_plans(ppo, epochs, train_actor, expected):
    plan = pass_plan(ppo, epochs=epochs, train_actor=train_actor)
    assert " ".join(plan) == expected
    assert len(plan) <= num_passes(ppo)


@pytest.mark.parametrize("ppo", [TOGETHER, IN_TURN, WITHOUT_CRITIC])
def test_the_length_of_an_iteration_is_the_longest_plan(ppo):
    assert num_passes(ppo) == len(pass_plan(ppo, epochs=ppo.num_update_epochs, train_actor=True))
