import pytest

from ppo_lightning.callbacks import ValueWarmup
from ppo_lightning.errors import ConfigError
from tests.helpers.controllers import StandIn


def trained(module, iterations):
    found = []
    for iteration in iterations:
        module.controls.iteration = iteration
        found.append(module.controls["train_actor"])
    return found


def test_the_actor_rests_in_the_first_iterations():
    module = StandIn(ValueWarmup(num_iterations=3)).start()
    assert trained(module, range(5)) == [0, 0, 0, 1, 1]
    [entry] = module.controls.journal
    assert entry["reason"] == "only the critic is trained in the first 3 iterations"


@pytest.mark.parametrize("iteration", [0, 1, 2, 3])
def test_a_resumed_run_goes_on_alike(iteration):
    module = StandIn(ValueWarmup(num_iterations=3)).start()
    module.controls.iteration = iteration
    again = module.resumed(ValueWarmup(num_iterations=3))
    assert again.controls.state_dict() == module.controls.state_dict()
    assert trained(again, range(iteration + 1, 5)) == [0, 0, 0, 1, 1][iteration + 1 :]


def test_a_run_without_an_iteration_for_the_actor_is_refused():
    for epochs in (2, 3):
        with pytest.raises(ConfigError, match=rf"must be below `trainer.max_epochs` \({epochs}\)"):
            StandIn(ValueWarmup(num_iterations=3), max_epochs=epochs).start()
    for settings in ({"max_epochs": 4}, {"max_epochs": -1}, {"max_epochs": 1, "fast_dev_run": 1}):
        StandIn(ValueWarmup(num_iterations=3), **settings).start()


def test_a_run_without_critic_is_refused():
    with pytest.raises(ConfigError, match=r"`ppo\.advantage: rloo` has none"):
        StandIn(ValueWarmup(num_iterations=3), ppo={"advantage": "rloo"}).start()


def test_senseless_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match="`num_iterations`"):
        ValueWarmup(num_iterations=0)
