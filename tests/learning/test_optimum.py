"""PPO reaches the optimum of problems whose optimum is known."""

from statistics import mean

import pytest

from tests.helpers.optimum import solve


def test_a_short_run_goes_most_of_the_way(tmp_path):
    """A third of the iterations of the whole experiment; seeds 0, 1, 2 reached 0.77, 0.84, 0.89."""
    outcome = solve(tmp_path, problem=0, beta=0.3, seed=1, iterations=20)
    print(outcome)
    assert outcome.score >= 0.75
    assert outcome.explained_variance >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("problem", [0, 1])
@pytest.mark.parametrize(
    ("beta", "target", "least"), [(0.3, 0.94, 0.90), (1.0, 0.72, 0), (0.1, 0.92, 0)]
)
def test_the_optimum_is_reached(tmp_path, problem, beta, target, least):
    outcomes = [
        solve(tmp_path / str(seed), problem=problem, beta=beta, seed=seed) for seed in range(3)
    ]
    print(*outcomes, sep="\n")
    assert mean(o.score for o in outcomes) >= target
    assert min(o.score for o in outcomes) >= least
