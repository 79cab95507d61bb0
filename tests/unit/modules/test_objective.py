"""Loss and logged sums of a microbatch against loops over plain numbers."""

import math
from dataclasses import replace

import pytest
import torch

from ppo_lightning.configs import KLConfig, PPOConfig
from ppo_lightning.modules.objective import SUMS, Coefficients, Counts, microbatch_terms
from tests.helpers.buffers import random_minibatch

MASK = torch.tensor(
    [
        [True, True, True, True, True],
        [True, False, True, True, False],  # a hole
        [False] * 5,
        [True, False, False, False, False],
        [True, True, True, False, False],
    ]
)
CLIPPED = PPOConfig(clip_range=0.2, clip_range_high=0.3, dual_clip=2.0, ent_coef=0.01, vf_coef=0.7)
PENALISED = PPOConfig(objective="penalty", value_clip_range=None, ent_coef=0.01)
COEFFICIENTS = Coefficients(
    clip_low=0.2, clip_high=0.3, ent_coef=0.01, kl_coef=0.05, penalty_coef=1.5
)
COUNTS = Counts(21.0, 6.0)  # of a larger minibatch


def tokens(experience, output):
    """Plain numbers of each valid token, with the row it is in."""
    names = ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns")
    for row, column in MASK.nonzero().tolist():
        token = {name: float(getattr(experience, name)[row, column]) for name in names}
        columns = zip(output._fields, output[:3], strict=False)
        token |= {name: float(values.detach()[row, column]) for name, values in columns}
        yield row, token


def policy_term(t, ppo):
    """Loss, ratio, outside, clip active, dual clipped of one token, by the formula in words."""
    ratio = math.exp(max(-10.0, min(10.0, t["logprobs"] - t["old_logprobs"])))
    outside = not 0.8 <= ratio <= 1.3
    gain = ratio * t["advantages"]
    if ppo.objective == "penalty":
        return COEFFICIENTS.penalty_coef * k3(t) - gain, ratio, outside, False, False
    clipped_gain = min(max(ratio, 0.8), 1.3) * t["advantages"]
    worst = min(gain, clipped_gain)
    dual = t["advantages"] < 0 and worst < 2.0 * t["advantages"]
    bounded = 2.0 * t["advantages"] if dual else worst
    return -bounded, ratio, outside, clipped_gain < gain, dual


def k3(t):
    difference = max(-10.0, min(10.0, t["logprobs"] - t["old_logprobs"]))
    return math.exp(difference) - 1 - difference


def value_term(t, ppo):
    plain = (t["values"] - t["returns"]) ** 2
    if ppo.value_clip_range is None:
        return plain, False
    low, high = t["old_values"] - 0.2, t["old_values"] + 0.2
    clipped = (min(max(t["values"], low), high) - t["returns"]) ** 2
    return max(plain, clipped), clipped > plain


def by_hand(experience, output, ppo, *, with_kl=False):
    """(loss per token with its row, sums by name)."""
    losses, sums = [], dict.fromkeys(SUMS, 0.0)
    for row, t in tokens(experience, output):
        policy, ratio, outside, active, dual = policy_term(t, ppo)
        value, value_clipped = value_term(t, ppo)
        weight = math.exp(t["logprobs"] - t["old_logprobs"])
        kl = weight * (t["logprobs"] - t["ref_logprobs"]) ** 2 / 2 if with_kl else 0.0
        loss = policy - 0.01 * t["entropy"] + ppo.vf_coef * value
        losses.append((row, loss + COEFFICIENTS.kl_coef * kl))
        beyond = abs(t["logprobs"] - t["old_logprobs"]) > 10
        found = {
            "policy_loss": policy,
            "entropy": t["entropy"],
            "kl_old": k3(t),
            "kl_loss": kl,
            "kl_ref": ratio * (t["logprobs"] - t["ref_logprobs"]),
            "kl_ref_before": t["old_logprobs"] - t["ref_logprobs"],
            "ratio": ratio,
            "outside": outside,
            "positive": t["advantages"] > 0,
            "outside_positive": outside and t["advantages"] > 0,
            "negative": t["advantages"] < 0,
            "outside_negative": outside and t["advantages"] < 0,
            "ratio_beyond_2": not 0.5 <= ratio <= 2,
            "clip_active": active,
            "dual_clipped": dual,
            "ratio_clamped": beyond,
            "log_ratio_abs": abs(t["logprobs"] - t["old_logprobs"]),
            "tokens": 1,
            "value_loss": value,
            "value_clipped": value_clipped,
            "value_tokens": 1,
        }
        for name, number in found.items():
            sums[name] += number
    sums["sequences"] = int(experience.sequences.response_mask.any(1).sum())
    return losses, sums


def terms_of(experience, output, ppo, **options):
    settings = {"kl": KLConfig(), "coefficients": COEFFICIENTS, "counts": COUNTS} | options
    return microbatch_terms(output, experience, ppo=ppo, **settings)


def assert_sums(terms, expected):
    found = dict(zip(SUMS, terms.sums.tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ppo", [CLIPPED, PENALISED], ids=lambda p: p.objective)
def test_loss_and_sums_are_those_of_a_loop_over_tokens(ppo):
    """T32, T35: padding is nan throughout."""
    experience, output = random_minibatch(MASK)
    losses, expected = by_hand(experience, output, ppo)
    flags = ("outside", "outside_positive", "outside_negative", "ratio_beyond_2")
    for flag in (*flags, *(("clip_active", "dual_clipped") if ppo is CLIPPED else ())):
        assert 0 < expected[flag] < expected["tokens"]  # the case occurs, and its opposite
    terms = terms_of(experience, output, ppo)
    assert_sums(terms, expected)
    assert terms.loss.item() == pytest.approx(sum(loss for _, loss in losses) / 21.0)
    differences = [t["logprobs"] - t["old_logprobs"] for _, t in tokens(experience, output)]
    assert float(terms.ratio_max) == pytest.approx(math.exp(max(differences)))
    assert float(terms.first_error) == pytest.approx(max(map(abs, differences)))
    terms.loss.backward()
    for leaf in output[:3]:
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[~MASK].any()


@pytest.mark.parametrize("padding", [math.nan, 7.0, -7.0])
def test_tokens_outside_the_band_are_told_apart_by_their_advantage(padding):
    """By hand; an advantage of 0 has no sign, and padding none that counts."""
    mask = torch.tensor([[True] * 6 + [False] * 2])
    experience, output = random_minibatch(mask)
    ratios = torch.tensor([[1.0, 1.4, 0.7, 2.5, 0.4, 1.4, 1.0, 1.0]], dtype=torch.float64)
    advantages = [[1.0, 1.0, 1.0, -1.0, -1.0, 0.0, padding, padding]]
    old = torch.zeros(mask.shape, dtype=torch.float64)
    experience = replace(
        experience, old_logprobs=old, advantages=torch.tensor(advantages, dtype=torch.float64)
    )
    logprobs = ratios.log().masked_fill(~mask, padding)
    terms = terms_of(experience, output._replace(logprobs=logprobs), CLIPPED)
    found = dict(zip(SUMS, terms.sums.tolist(), strict=True))
    assert (found["positive"], found["outside_positive"]) == (3, 2)
    assert (found["negative"], found["outside_negative"]) == (2, 2)
    assert (found["outside"], found["ratio_beyond_2"]) == (5, 2)


def test_the_kl_of_a_tiny_step_is_not_lost_in_float32():
    """T27: exp(x) - 1 - x would be made of rounding, and below 0 as often as not."""
    experience, output = random_minibatch(MASK)
    steps = torch.logspace(-5, -3, MASK.numel()).reshape(MASK.shape)
    old = torch.zeros(MASK.shape)
    moved = output._replace(logprobs=steps.masked_fill(~MASK, torch.nan))
    terms = terms_of(replace(experience, old_logprobs=old), moved, CLIPPED)
    expected = float(steps[MASK].double().square().sum() / 2)
    assert float(terms.sums[SUMS.index("kl_old")]) == pytest.approx(expected, rel=1e-2)


def test_sequence_means_weigh_every_response_alike():
    experience, output = random_minibatch(MASK)
    losses, _ = by_hand(experience, output, CLIPPED)
    rows = {row: [loss for r, loss in losses if r == row] for row, _ in losses}
    ppo = replace(CLIPPED, loss_aggregation="sequence")
    expected = sum(sum(row) / len(row) for row in rows.values()) / 6.0
    assert terms_of(experience, output, ppo).loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("ppo", [CLIPPED, PENALISED], ids=lambda p: p.objective)
def test_kl_to_the_reference_in_the_loss(ppo):
    experience, output = random_minibatch(MASK)
    losses, expected = by_hand(experience, output, ppo, with_kl=True)
    terms = terms_of(experience, output, ppo, kl=KLConfig(estimator="k2", placement="loss"))
    assert_sums(terms, expected)
    assert terms.loss.item() == pytest.approx(sum(loss for _, loss in losses) / 21.0)


def test_exact_kl_in_the_loss_is_that_of_the_whole_distribution():
    experience, output = random_minibatch(MASK)
    generator = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(2, *MASK.shape, 3, generator=generator, dtype=torch.float64)
    ours, theirs = (x.masked_fill(~MASK[..., None], torch.nan) for x in (ours, theirs))
    experience = replace(experience, temperature=0.5)
    kl = KLConfig(estimator="full", placement="loss")
    terms = terms_of(experience, output._replace(logits=ours), CLIPPED, kl=kl, ref_logits=theirs)
    p, q = (2 * ours[MASK]).softmax(-1), (2 * theirs[MASK]).softmax(-1)
    total = float((p * (p / q).log()).sum())
    losses, expected = by_hand(experience, output, CLIPPED)
    assert_sums(terms, {**expected, "kl_loss": total})
    without = sum(loss for _, loss in losses)
    assert terms.loss.item() == pytest.approx((without + 0.05 * total) / 21.0)


def test_t41_tokens_beyond_the_clamp_are_counted_and_stay_finite():
    experience, output = random_minibatch(MASK)
    far = experience.old_logprobs.clone()
    far[0, 0], far[4, 1] = -100.0, 100.0
    experience = replace(experience, old_logprobs=far)
    terms = terms_of(experience, output, CLIPPED)
    assert_sums(terms, by_hand(experience, output, CLIPPED)[1])
    assert terms.sums[SUMS.index("ratio_clamped")] == 2
    assert float(terms.ratio_max) == pytest.approx(math.exp(10.0))
    assert terms.loss.isfinite()


def test_t41_a_nan_at_a_valid_token_stays_visible():
    experience, output = random_minibatch(MASK)
    with torch.no_grad():
        output.logprobs[0, 1] = torch.nan
    terms = terms_of(experience, output, CLIPPED)
    assert terms.loss.isnan()
    assert terms.sums.isnan().any()


def test_a_microbatch_without_a_valid_token_adds_nothing_but_a_graph():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    experience, output = random_minibatch(nothing)
    terms = terms_of(experience, output, CLIPPED)
    terms.loss.backward()
    assert terms.loss == terms.ratio_max == terms.first_error == 0
    assert not terms.sums.any()
    assert all(not leaf.grad.any() for leaf in output[:3] if leaf.grad is not None)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("ppo", [CLIPPED, PENALISED], ids=lambda p: p.objective)
def test_importance_weights_multiply_the_policy_loss_alone(ppo, aggregation):
    ppo = replace(ppo, loss_aggregation=aggregation)
    experience, output = random_minibatch(MASK)
    weights = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(5)).double() * 2
    weighted = replace(experience, importance_weights=weights.masked_fill(~MASK, torch.nan))
    plain, found = terms_of(experience, output, ppo), terms_of(weighted, output, ppo)
    policy, rows = {}, MASK.nonzero().tolist()
    for (row, column), (_, t) in zip(rows, tokens(experience, output), strict=True):
        policy[row, column] = policy_term(t, ppo)[0]
    lengths = dict(zip(range(5), MASK.sum(1).tolist(), strict=True))
    each = {"token": lambda row: 21.0, "sequence": lambda row: lengths[row] * 6.0}[aggregation]
    added = {at: float(weights[at] - 1) * loss / each(at[0]) for at, loss in policy.items()}
    assert (found.loss - plain.loss).item() == pytest.approx(sum(added.values()))
    sums = dict(zip(SUMS, (found.sums - plain.sums).tolist(), strict=True))
    change = sum(float(weights[at] - 1) * loss for at, loss in policy.items())
    assert sums.pop("policy_loss") == pytest.approx(change)
    assert not any(sums.values())


def test_weights_of_one_change_no_bit_of_loss_and_gradient():
    found = []
    for weights in (None, MASK.double()):
        experience, output = random_minibatch(MASK)
        terms = terms_of(replace(experience, importance_weights=weights), output, CLIPPED)
        terms.loss.backward()
        found.append([terms.loss.detach(), *(leaf.grad for leaf in output[:3])])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
