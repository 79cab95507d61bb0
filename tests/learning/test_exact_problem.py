"""The exactly solvable problem is what other tests are judged by, so it is checked from outside."""

from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.helpers.exact.dynamics import explained_variance
from tests.helpers.exact.models import fine_tune, fresh_policy
from tests.helpers.exact.task import draw_task
from tests.helpers.exact_problem import (
    EOS,
    MAX_TOKENS,
    NUM_PROMPTS,
    PAD,
    ExactProblem,
    ExactReward,
    Family,
    all_responses,
    export_problem,
    make_problem,
    prompt_text,
    response_logprobs,
    visits,
)

FAMILIES: tuple[Family, ...] = ("phi", "gpt2")


@dataclass(frozen=True)
class Completions:
    prompts: list[str]
    response_ids: list[list[int]]
    truncated: list[bool]


@pytest.fixture(params=FAMILIES)
def problem(request: pytest.FixtureRequest) -> ExactProblem:
    return make_problem(0, request.param)


def exact_objective(problem: ExactProblem, model: PreTrainedModel, beta: float) -> float:
    with torch.no_grad():
        return float(problem.evaluate(problem.policy_of(model), beta=beta).objective)


def sample(
    problem: ExactProblem, model: PreTrainedModel, count: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Responses from transformers' own decode loop over left-padded prompts: another code path."""
    prompt_index = torch.arange(count) % NUM_PROMPTS
    ids, mask = problem.left_padded_prompts(prompt_index)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=MAX_TOKENS
        )
    responses = out[:, ids.shape[1] :]
    width = MAX_TOKENS - responses.shape[1]
    return prompt_index, torch.nn.functional.pad(responses, (0, width), value=PAD)


# (J*, KL of the optimum) for seed 0, beta 0.1, 0.3, 1.0; solved once by an independent program.
@pytest.mark.parametrize(
    ("beta", "objective", "kl"), [(0.1, 2.799, 7.16), (0.3, 1.735, 4.07), (1.0, 0.463, 0.57)]
)
def test_seed_zero_has_its_known_optimum(beta, objective, kl):
    problem = make_problem(0)
    policy, best = problem.optimum(beta=beta)
    assert float(best) == pytest.approx(objective, abs=5e-4)
    assert float(problem.evaluate(policy, beta=beta).kl) == pytest.approx(kl, abs=5e-3)


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_closed_form_equals_brute_force(problem, beta):
    assert_close(problem.optimum(beta=beta)[1], problem.brute_force_objective(beta=beta))


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_best_policy_earns_the_best_objective(problem, beta):
    policy, best = problem.optimum(beta=beta)
    evaluation = problem.evaluate(policy, beta=beta)
    assert_close(evaluation.objective, best)
    assert_close(evaluation.objective, evaluation.reward - beta * evaluation.kl)


def test_evaluation_equals_the_sum_over_all_responses(problem):
    with torch.no_grad():
        policy = problem.policy_of(problem.off_reference_start(steps=5))
    responses = all_responses()
    logprobs = response_logprobs(policy, responses)
    ratio = logprobs - response_logprobs(problem.reference_policy, responses)
    rows = torch.arange(NUM_PROMPTS).repeat_interleave(len(responses))
    rewards = problem.reward(rows, responses.repeat(NUM_PROMPTS, 1)).view(NUM_PROMPTS, -1)

    def expectation(x):
        return (logprobs.exp() * x).sum(1).mean()

    evaluation = problem.evaluate(policy, beta=0.3)
    assert_close(expectation(torch.ones_like(rewards)), torch.tensor(1.0))
    assert_close(evaluation.reward, expectation(rewards), rtol=1e-4, atol=1e-5)
    assert_close(evaluation.kl, expectation(ratio), rtol=1e-4, atol=1e-5)
    assert_close(evaluation.entropy, expectation(-logprobs), rtol=1e-4, atol=1e-5)


def test_reward_has_mean_zero_and_spread_one_under_the_reference(problem):
    responses = all_responses()
    probabilities = response_logprobs(problem.reference_policy, responses).exp()
    rows = torch.arange(NUM_PROMPTS).repeat_interleave(len(responses))
    rewards = problem.reward(rows, responses.repeat(NUM_PROMPTS, 1)).view(NUM_PROMPTS, -1)
    mean = (probabilities * rewards).sum(1).mean()
    variance = (probabilities * (rewards - mean) ** 2).sum(1).mean()
    assert float(mean) == pytest.approx(0.0, abs=1e-5)
    assert float(variance) == pytest.approx(1.0, abs=1e-5)


def test_reference_scores_zero_and_the_gradient_check_starts_elsewhere(problem):
    assert problem.score(problem.reference, beta=0.3) == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        off = problem.evaluate(problem.policy_of(problem.off_reference_start()), beta=0.3)
    assert 0.5 < float(off.kl) < 5.0


def test_gradient_equals_central_differences(problem):
    model = problem.off_reference_start(steps=5).double()
    gradient = problem.objective_gradient(model, beta=0.3)
    generator = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(g.shape, generator=generator, dtype=g.dtype) + g / g.norm().clamp(1e-12)
        for name, g in gradient.items()
    }
    expected = sum(float((g * direction[name]).sum()) for name, g in gradient.items())

    def objective_at(step: float) -> float:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(step * direction[name])
        return exact_objective(problem, model, beta=0.3)

    # Truncation error ~ step², rounding ~ 1e-16 / step: both far below the tolerance.
    step = 1e-5
    above, below = objective_at(step), objective_at(-2 * step)
    assert (above - below) / (2 * step) == pytest.approx(expected, rel=1e-5)


def test_gradient_at_the_reference_does_not_depend_on_beta(problem):
    # KL(policy || reference) has its minimum there, so its slope is 0.
    model = problem.policy_copy()
    low, high = (problem.objective_gradient(model, beta=beta) for beta in (0.0, 10.0))
    scale = max(float(g.abs().max()) for g in low.values())
    for name, g in low.items():
        assert_close(high[name], g, rtol=0, atol=1e-4 * scale)


def test_sampling_agrees_with_the_exact_objective(problem):
    model = problem.off_reference_start()
    prompt_index, responses = sample(problem, model, count=8_192, seed=0)
    with torch.no_grad():
        policy = problem.policy_of(model)
    log_ratio = response_logprobs(policy, responses) - response_logprobs(
        problem.reference_policy, responses
    )
    taken = log_ratio[prompt_index, torch.arange(len(responses))]
    rewards = problem.reward(prompt_index, responses)
    exact = problem.evaluate(policy, beta=0.3)
    for drawn, truth in (
        (rewards, exact.reward),
        (taken, exact.kl),
        (rewards - 0.3 * taken, exact.objective),
    ):
        # Prompts are dealt evenly, so the pooled spread overstates the error a little.
        error = float(drawn.std()) / len(drawn) ** 0.5
        assert abs(float(drawn.mean() - truth)) < 4 * error


def test_visits_are_probabilities_of_still_running(problem):
    reached = visits(problem.reference_policy)
    assert_close(reached[0].sum(), torch.tensor(1.0))
    sums = [float(r.sum()) for r in reached]
    assert sums == sorted(sums, reverse=True)


def test_critic_is_compared_with_exact_values(problem):
    policy = problem.reference_policy
    values = problem.evaluate(policy, beta=0.3).state_values
    weights = visits(policy)
    shifted = [v + 5.0 for v in values]
    assert explained_variance(values, values, weights=weights) == pytest.approx(1.0)
    assert explained_variance(shifted, values, weights=weights) == pytest.approx(1.0, abs=1e-4)
    flat = problem.critic_explained_variance(policy, lambda ids: ids.float() * 0, beta=0.3)
    assert flat == pytest.approx(0.0, abs=1e-6)


def left_padded_logits(problem, model, with_positions: bool) -> torch.Tensor:
    ids, mask = problem.left_padded_prompts(torch.arange(NUM_PROMPTS))
    positions = (mask.cumsum(1) - 1).clamp(min=0) if with_positions else None
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]


def test_left_padded_batch_gives_the_exact_table(problem):
    logits = left_padded_logits(problem, problem.reference, with_positions=True)
    assert_close(logits.log_softmax(-1), problem.reference_policy[0][:, 0], rtol=1e-4, atol=1e-5)


def test_learned_positions_show_missing_position_ids():
    problem = make_problem(0, "gpt2")
    logits = left_padded_logits(problem, problem.reference, with_positions=False)
    difference = logits.log_softmax(-1)[:, EOS:] - problem.reference_policy[0][:, 0, EOS:]
    full_width = torch.tensor([len(p) == 3 for p in problem.task.prompts])
    assert float(difference[full_width].abs().max()) < 1e-4
    assert float(difference[~full_width].abs().amax(1).min()) > 0.05


def test_padding_stays_impossible_under_rough_training(problem):
    model = problem.policy_copy()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(25):
        gradient = problem.objective_gradient(model, beta=0.1)
        for name, parameter in model.named_parameters():
            parameter.grad = -gradient[name]
        optimizer.step()
    with torch.no_grad():
        policy = problem.policy_of(model)
    assert problem.score(model, beta=0.1) > 0.7  # it did train
    for log_probs in policy:
        assert float(log_probs[..., PAD].max()) < -300
        assert float(log_probs[..., PAD].exp().max()) == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_a_plain_folder_with_the_same_policy(family, tmp_path):
    problem = make_problem(0, family)
    files = export_problem(tmp_path, 0, family, copies=2)
    loaded = AutoModelForCausalLM.from_pretrained(files.model).eval()
    with torch.no_grad():
        for ours, theirs in zip(problem.reference_policy, problem.policy_of(loaded), strict=True):
            assert_close(theirs, ours, rtol=0, atol=0)
    tokenizer = AutoTokenizer.from_pretrained(files.model)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)
    texts = [prompt_text(prompt) for prompt in problem.task.prompts]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids, mask = problem.left_padded_prompts(torch.arange(NUM_PROMPTS))
    assert_close(batch["input_ids"], ids)
    assert_close(batch["attention_mask"], mask)
    assert tokenizer.decode([3, 5, EOS], skip_special_tokens=True) == "t3 t5"
    lines = files.prompts.read_text(encoding="utf-8").splitlines()
    assert lines == [f'{{"prompt": "{text}"}}' for text in texts] * 2


def test_reward_component_scores_completions_as_the_problem_does():
    problem = make_problem(0)
    rows = torch.tensor([2, 0, 1, 3])
    ids = [[EOS], [4, 3, EOS], [7, 5, 2, 2], [6, 2, 3, EOS]]
    completions = Completions(
        prompts=[prompt_text(problem.task.prompts[i]) for i in rows],
        response_ids=ids,
        truncated=[False, False, True, False],
    )
    padded = torch.tensor([row + [PAD] * (MAX_TOKENS - len(row)) for row in ids])
    rewards = ExactReward(seed=0)(completions)
    assert rewards.shape == (4,)
    assert_close(rewards, problem.reward(rows, padded))


def test_reward_adds_its_parts_by_hand():
    problem = make_problem(0)
    task, (first, second) = problem.task, problem.task.needle[1].tolist()
    worth = (
        task.position[1, 0, first]
        + task.position[1, 1, second]
        + task.position[1, 2, EOS]
        + task.pair[first, second]
        + task.pair[second, EOS]
        + task.skip[1, first, EOS]
        + task.length[2]
        + 2.0
    )
    reward = problem.task.raw_reward(torch.tensor([1]), torch.tensor([[first, second, EOS, PAD]]))
    assert_close(reward, worth[None])


@pytest.mark.parametrize(
    ("ids", "truncated"),
    [
        ([], True),
        ([EOS, 3], False),
        ([3, PAD, EOS], False),
        ([3, 4, 5, 6, EOS], False),
        ([3, 4], True),
        ([3, 4, 5, 6], False),
        ([3, EOS], True),
    ],
)
def test_reward_component_refuses_impossible_responses(ids, truncated):
    completions = Completions(prompts=["t3"], response_ids=[ids], truncated=[truncated])
    with pytest.raises(ValueError, match="cannot occur"):
        ExactReward(seed=0)(completions)


def test_reward_component_refuses_foreign_prompts():
    completions = Completions(prompts=["t2 t2"], response_ids=[[EOS]], truncated=[False])
    with pytest.raises(ValueError, match="not of this problem"):
        ExactReward(seed=0)(completions)


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match="llama"):
        make_problem(0, "llama")


def test_building_a_reference_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fine_tune(fresh_policy(0, "phi"), draw_task(0), seed=0, steps=1)
    assert_close(torch.rand(3), expected)
