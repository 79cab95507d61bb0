"""The penalty that keeps the policy near the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require, require_at_least, require_fields, require_positive

KLEstimatorName = Literal["k1", "k2", "k3", "abs", "full"]


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """KL(policy‖reference) as part of the objective.

    Args:
        coef: β. Meant for scores of about unit spread.
        estimator: Of the per-token KL from the sampled token (``k1`` log-ratio, ``k2``, ``k3``,
            ``abs``) or from the whole vocabulary (``full``).
        placement: ``token`` puts −β·KL_t into each token's reward, ``last`` puts the response's
            sum on its last token, ``loss`` adds the KL to the loss (``k2`` or ``full`` only:
            their gradient is that of the KL).
        max_kl_ref: An update stops where the policy, moving away, is farther than this from the
            reference; nats per response, measured on the minibatch. A buffer that lies beyond it
            trains the way back: its scores count nothing, only the penalty does. None sets no
            bound.
        max_kl_ref_per_token: The same in nats per token.
    """

    coef: float = 0.05
    estimator: KLEstimatorName = "k1"
    placement: Literal["token", "last", "loss"] = "token"
    max_kl_ref: float | None = None
    max_kl_ref_per_token: float | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_at_least("coef", self.coef, 0)
        require_positive("max_kl_ref", self.max_kl_ref)
        require_positive("max_kl_ref_per_token", self.max_kl_ref_per_token)
        require(
            self.placement != "loss" or self.estimator in ("k2", "full"),
            f"`placement: loss` needs `estimator: k2` or `full`, got {self.estimator}: the "
            "gradient of the others is not that of the KL.",
        )
