"""What happens to scores between the components and the token rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_fields,
    require_positive,
    require_within,
)

NormalizerName = Literal["none", "batch", "running", "ema", "reference", "group"]
_EMA_DECAY = 0.9


@dataclass(frozen=True, kw_only=True)
class WeightSchedule:
    """A reward's weight as a function of the iteration alone, so that a resume needs no state.

    Args:
        start: Weight up to iteration ``delay``.
        end: Weight from iteration ``delay + iterations`` on; held-out answers are scored with it
            all along, so that their scores can be compared.
        iterations: How many the way from one to the other takes.
        kind: ``linear``, half a ``cosine`` wave, or one ``step`` at the end of the way.
        delay: Iterations before the way begins.
    """

    start: float
    end: float
    iterations: int
    kind: Literal["linear", "cosine", "step"] = "linear"
    delay: int = 0

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("iterations", self.iterations, 1)
        require_at_least("delay", self.delay, 0)
        for name in ("start", "end"):
            value = getattr(self, name)
            require(math.isfinite(value), f"`{name}` must be a finite number, got {value}.")


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """Hold the mean of a reward component at a bound, with a Lagrange multiplier λ as its weight.

    The component's score c is a cost then: λ · (bound - c) joins the weighted sum (``at_least``:
    λ · (c - bound)). After each iteration λ rises by ``lr`` times what the mean c of all responses
    is beyond the bound, and falls by as much as it is within.

    Args:
        bound: In the component's own unit.
        direction: Whether the mean shall be ``at_most`` or ``at_least`` the bound.
        lr: Added to λ for each unit beyond the bound. λ is in reward for each unit of c: a length
            in tokens wants about 0.001, a share of texts about 1.
        damping: Beside that, each unit that the last iteration was beyond the bound counts so much,
            at once and once: about 5 to 20 times ``lr`` keeps λ and the mean from swinging.
        initial: λ of the first iteration.
        max: Largest λ; the least is 0, where the bound costs nothing.
    """

    bound: float
    direction: Literal["at_most", "at_least"] = "at_most"
    lr: float = 0.05
    damping: float = 0.0
    initial: float = 0.0
    max: float = 10.0

    def __post_init__(self) -> None:
        require_fields(self)
        require(math.isfinite(self.bound), f"`bound` must be a finite number, got {self.bound}.")
        require_positive("lr", self.lr)
        require_at_least("damping", self.damping, 0)
        require_positive("max", self.max)
        require_within("initial", self.initial, 0, self.max)

    @property
    def sign(self) -> int:
        """-1 where the component's score is held down, 1 where it is held up."""
        return -1 if self.direction == "at_most" else 1

    def violation(self, mean: float) -> float:
        """Return how far a mean is beyond the bound; below 0 where it is within."""
        return self.sign * (self.bound - mean)


@dataclass(frozen=True, kw_only=True)
class RewardProcessing:
    """Order: weighted sum -> penalties -> normalise -> clip.

    All of it is about scores of whole responses. Rewards per token are multiplied by their weight
    and added at their tokens, in the units of what comes out at the end, as the KL penalty is.

    Args:
        rescale_constraints: Divide the weighted sum by 1 + Σλ over all constraints, so that a
            multiplier that grows does not make scores larger against the KL penalty.
        missing_eos_penalty: Subtracted where a response ended without an end token.
        overlong_penalty: Subtracted in full from ``overlong_tokens[1]`` tokens on, not at all up to
            ``overlong_tokens[0]``, and in proportion between.
        overlong_tokens: Where that penalty begins and where it is full, in response tokens.
        mask_truncated: Leave responses without an end token out of the losses.
        normalize: ``none``, or scores less their mean, divided by their spread σ: of this
            iteration's responses (``batch``), of all so far (``running``), of recent iterations
            (``ema``), of the starting policy (``reference``), or of one prompt's own responses
            (``group``). A coefficient β of the KL then acts like β_eff = β · σ on the scores as
            they were; a moving σ moves it.
        ema_decay: For ``ema``: weight that the past keeps at each iteration; 1 / (1 - decay)
            iterations are remembered.
        reference_mean: For ``reference``: the mean, where it is known beforehand. None measures
            mean and spread on the first buffer of the run whose scores differ, and keeps them.
        reference_std: For ``reference``: the spread that belongs to ``reference_mean``.
        clip: Scores are clipped to ± this; None turns it off.
        on_nonfinite: A NaN or infinite score is an ``error``, or the response is left out of the
            buffer and counted (``drop``). That of a reward of weight 0 does neither.
    """

    rescale_constraints: bool = False
    missing_eos_penalty: float = 0.0
    overlong_penalty: float = 0.0
    overlong_tokens: tuple[int, int] | None = None
    mask_truncated: bool = False
    normalize: NormalizerName = "none"
    ema_decay: float = _EMA_DECAY
    reference_mean: float | None = None
    reference_std: float | None = None
    clip: float | None = 10.0
    on_nonfinite: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("missing_eos_penalty", self.missing_eos_penalty, 0)
        require_at_least("overlong_penalty", self.overlong_penalty, 0)
        require_positive("clip", self.clip)
        start, end = self.overlong_tokens or (0, 1)
        require(
            0 <= start < end,
            f"`overlong_tokens` must be two rising token counts, got {self.overlong_tokens}.",
        )
        require(
            self.overlong_penalty == 0 or self.overlong_tokens is not None,
            "`overlong_penalty` needs `overlong_tokens: [start, end]`.",
        )
        self._check_normalizer()

    def _check_normalizer(self) -> None:
        """A knob of another kind of normalisation would do nothing, which nobody means."""
        decay, mean, std = self.ema_decay, self.reference_mean, self.reference_std
        require(0 <= decay < 1, f"`ema_decay` must lie in [0, 1), got {decay}.")
        require(
            decay == _EMA_DECAY or self.normalize == "ema",
            f"`ema_decay` ({decay}) is for `normalize: ema`, and `normalize` is {self.normalize}.",
        )
        require(
            mean is None or math.isfinite(mean),
            f"`reference_mean` must be a finite number, got {mean}.",
        )
        require_positive("reference_std", std)
        require(
            (mean is None) == (std is None),
            f"`reference_mean` ({mean}) and `reference_std` ({std}) belong together: give both, "
            "or neither to have them measured.",
        )
        require(
            std is None or self.normalize == "reference",
            "`reference_mean` and `reference_std` are for `normalize: reference`, and `normalize` "
            f"is {self.normalize}.",
        )
