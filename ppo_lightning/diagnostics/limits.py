"""The one table of the rules' thresholds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ppo_lightning.configs.checks import require, require_at_least, require_positive, require_within

_SHARES = (
    *("skipped_share", "dropped_share", "broken_share", "clip_fraction", "clip_watch"),
    *("entropy_share", "entropy_critical", "entropy_fall", "entropy_price", "collapsed_entropy"),
    *("opening_rise", "length_correlation", "waiting_share"),
)


@dataclass(frozen=True, kw_only=True)
class RuleLimits:
    """When the rules of the doctor speak.

    Limits on KL to the reference hold for a response: they are at least so many nats, and more for
    long responses, so many nats a token. σ is the spread of the scores within a buffer at the
    start; gains are differences of medians, in σ.

    Args:
        step_up: Factor on ``reward_spread``, ``mismatch`` and ``kl_old`` from which it is a degree
            worse.
        skipped_share: Share of an iteration's steps that were skipped as not finite, for ``ill``.
        dropped_share: Share of the responses without a usable score, for ``ill``.
        broken_share: Share of steps, or of responses, that are not finite, for ``critical``.
        outlier_skew: |skew| of the scores of one buffer beyond which one of them is suspected; for
            n scores at most 0.7 √n, as one outlier makes no more than √n.
        outlier_factor: It is one if it lies so many running spreads (at the start so many
            interquantile ranges) from the running level.
        reward_spread: Spread of the scores that training sees, for ``watch``. The usual β is meant
            for about 1.
        stale_lag: Updates between the weights that sampled and the current ones, beyond the lag
            that the run is set up for, for ``ill`` unless importance weights correct it.
        capped_share: Share of corrected tokens whose weight was cut.
        negative_kl: Mean KL to the reference below minus this, in nats per response: a KL is never
            negative if the samples are the policy's own.
        mismatch: |log-probability by the sampler − by the trainer|, in nats per token, for
            ``watch``.
        first_kl: |KL to the reference| in the first iteration, in nats per response: policy and
            reference are the same model there, as a rule.
        first_kl_per_token: The same for long responses; the larger bound holds.
        ratio_error: |log-ratio| before any step, in nats.
        kl_old: KL(old‖new) of an update, in nats per token, for ``ill`` together with
            ``clip_fraction``; ``step_up`` times it is ``critical`` together with ``clip_watch``.
            Healthy: up to 0.02.
        clip_fraction: Share of tokens outside the band, see ``kl_old``.
        clip_watch: The same for ``watch`` alone.
        many_epochs: Passes over a buffer from which on an update that goes too far is put down to
            them.
        kl_ref: KL to the reference that deserves a look, in nats per response. Healthy: 3 to 10.
        kl_ref_per_token: The same for long responses; the larger bound holds.
        kl_growing: Factor on that bound from which a KL that grows is ``ill``, held by β or not.
        kl_far: The same for one that does not grow.
        kl_critical: The same for ``critical``.
        kl_growth: Factor within 8 iterations that is still growth and no plateau.
        penalty_share: β · KL below this share of the score's spread holds nothing back.
        entropy_share: Share of the first iteration's entropy that must be left.
        entropy_critical: The same for ``critical``.
        entropy_fall: Share of its level that entropy may lose in one iteration.
        score_fall: Fall of the mean score from its level, in its spread, that is a collapse.
        score_noise: It must be as many times the usual change, too.
        collapsed_entropy: Share of the first iteration's entropy below which such a fall is
            ``critical``.
        hacked_gain: Gain of the proxy, in σ, from which on it is looked for what it was bought
            with.
        critical_gain: The same for ``critical``, where gold is below its start.
        held_gain: Gain of the proxy, in σ, that is still held while gold falls, for
            over-optimisation.
        gold_errors: Fall of the gold score from its best, in standard errors of the difference;
            both are means of two validations.
        gold_fall: The same in σ of the proxy, where the gold score's error is not known.
        hacked_gold: Fall of the gold score below its start, in σ of the proxy, beside which a loss
            of entropy is only watched.
        narrow_gain: Gain of the proxy, in σ, that half of the entropy buys at least where it is the
            reward that takes it; with less the loss of entropy is the illness.
        entropy_price: Share of the first iteration's entropy; less is a price of a gain.
        repetition: Rise of the share of repeated bigrams that is such a price.
        opening_rise: Rise of the share of answers with the commonest beginning that is one.
        length_growth: Factor on the length at the start.
        length_correlation: Correlation of score and length at the start.
        patience: Iterations of training before the absence of learning is judged.
        heavy_penalty: β · KL, in spreads of the scores, above which it outweighs them.
        efficiency: Gain, in σ, over √(2 · KL): what the same KL could buy at best. Healthy: 0.25
            and more.
        bought_gain: Gain, in σ, that is one however large the KL.
        moved_kl: KL to the reference, in nats per response, from which on a policy has moved.
        flat_gain: Gain, in σ, below which the score is flat.
        still_kl: KL to the reference, in nats per response, below which a policy stands still.
        still_kl_per_token: The same for long responses; the larger bound holds.
        explained_variance: Below minus this the critic is worse than none.
        absurd_variance: Below minus this it is so at once.
        blind_variance: |explained variance| below which the critic sees nothing.
        dim_variance: The same for ``watch``, and for ``ill`` after twice ``blind_after``.
        blind_after: Iterations before that is judged.
        swing: Mean change of the score from one iteration to the next, back and forth, in σ.
        swing_turns: Of the last 8 such changes, how many turn back at least.
        waiting_share: Share of the time that a rank waits for others, for ``watch``; twice it is
            ``ill``.

    Source:
        The table of illnesses in the documentation; figures are measured on small labelled runs.
    """

    step_up: float = 4.0
    skipped_share: float = 0.1
    dropped_share: float = 0.02
    broken_share: float = 0.5
    outlier_skew: float = 8.0
    outlier_factor: float = 20.0
    reward_spread: float = 8.0
    stale_lag: float = 2.0
    capped_share: float = 0.05
    negative_kl: float = 0.3
    mismatch: float = 0.005
    first_kl: float = 0.1
    first_kl_per_token: float = 0.001
    ratio_error: float = 0.5
    kl_old: float = 0.05
    clip_fraction: float = 0.3
    clip_watch: float = 0.2
    many_epochs: float = 6.0
    kl_ref: float = 5.0
    kl_ref_per_token: float = 0.1
    kl_growing: float = 2.0
    kl_far: float = 3.0
    kl_critical: float = 6.0
    kl_growth: float = 1.15
    penalty_share: float = 0.05
    entropy_share: float = 0.5
    entropy_critical: float = 0.1
    entropy_fall: float = 0.3
    score_fall: float = 1.0
    score_noise: float = 6.0
    collapsed_entropy: float = 0.2
    hacked_gain: float = 1.5
    critical_gain: float = 3.0
    held_gain: float = 0.5
    gold_errors: float = 6.0
    gold_fall: float = 0.3
    hacked_gold: float = 1.5
    narrow_gain: float = 2.75
    entropy_price: float = 0.7
    repetition: float = 0.15
    opening_rise: float = 0.3
    length_growth: float = 1.35
    length_correlation: float = 0.5
    patience: int = 7
    heavy_penalty: float = 1.0
    efficiency: float = 0.12
    bought_gain: float = 0.5
    moved_kl: float = 0.5
    flat_gain: float = 0.15
    still_kl: float = 0.2
    still_kl_per_token: float = 0.002
    explained_variance: float = 0.3
    absurd_variance: float = 3.0
    blind_variance: float = 0.0005
    dim_variance: float = 0.01
    blind_after: int = 7
    swing: float = 0.7
    swing_turns: int = 5
    waiting_share: float = 0.4

    def __post_init__(self) -> None:
        for field in fields(self):
            require_positive(field.name, getattr(self, field.name))
        for name in _SHARES:
            require_within(name, getattr(self, name), 0.0, 1.0)
        for name in ("kl_growth", "length_growth", "outlier_factor", "step_up"):
            require_at_least(name, getattr(self, name), 1.0)
        require(
            self.clip_watch <= self.clip_fraction,
            f"`clip_watch` ({self.clip_watch}) must not be above `clip_fraction` "
            f"({self.clip_fraction}).",
        )

    def kl_bound(self, length: float | None) -> float:
        """KL to the reference that deserves a look, for responses of ``length`` tokens, in nats."""
        return self._of_response("kl_ref", length)

    def first_bound(self, length: float | None) -> float:
        """KL to the reference before any update that deserves a look, in nats per response."""
        return self._of_response("first_kl", length)

    def still_bound(self, length: float | None) -> float:
        """KL to the reference of a policy that stands still, in nats per response."""
        return self._of_response("still_kl", length)

    def _of_response(self, name: str, length: float | None) -> float:
        """The larger of a limit for responses and the one for their tokens."""
        whole: float = getattr(self, name)
        per_token: float = getattr(self, f"{name}_per_token")
        return max(whole, per_token * (length or 0.0))
