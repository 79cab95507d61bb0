"""The PPO objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import (
    require,
    require_at_least,
    require_fields,
    require_positive,
    require_within,
)

CLIP_RANGES = (1e-6, 1 - 1e-6)
PENALTY_COEFS = (1e-6, 1e6)
"""Bounds in a config, and of what the value may become during the run."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Objective, advantages and update epochs.

    Args:
        objective: ``clip`` is PPO-Clip; ``penalty`` is PPO-Penalty with KL(old‖new).
        clip_range: ε, the ratio is clipped to [1 - ε, 1 + ε].
        clip_range_high: Upper ε where it differs from the lower one.
        dual_clip: For negative advantages the loss is at most ``dual_clip`` × |A|; above 1.
        penalty_coef: First coefficient of KL(old‖new) in ``objective: penalty``.
        penalty_target: KL(old‖new), nats per token, that the coefficient is steered to.
        num_update_epochs: K, passes over the buffer.
        update_order: Each step trains actor and critic ``together``, or they take turns pass by
            pass (``in_turn``: critic, actor, critic, …; a shared trunk is then the actor's alone).
        backward: Of a step that trains both: ``in_turn`` runs forward and backward of the actor,
            then of a separate critic, so that the activations of one network exist at a time, with
            the same gradients; ``together`` has one backward pass, as strategies for several ranks
            always have.
        extra_critic_epochs: Passes after those K in which the critic alone is trained.
        target_kl: Bound on KL(old‖new), nats per token; None turns the stop off.
        kl_stop_factor: The update stops above ``kl_stop_factor`` × ``target_kl``.
        advantage: ``gae``; or without a critic, from the responses to one prompt: ``rloo`` (less
            the mean of the others) or ``group`` (z-score), of score and KL penalty together.
        drop_flat_prompts: Leave prompts whose responses all have the same score out of the losses.
        gamma: Discount per token.
        gae_lambda: λ of the actor's advantages: 0 is one-step TD, 1 is Monte Carlo.
        value_gae_lambda: λ of the critic's returns; None takes ``gae_lambda``.
        bootstrap_truncated: Use V after the last token of a response without end token.
        whiten_advantages: Centre and scale advantages over the whole buffer; those of ``rloo`` and
            ``group`` are scaled only.
        vf_coef: Weight of the value loss, which has no factor ½.
        value_clip_range: Clip of V around the old value; None turns it off.
        value_huber_delta: Huber loss instead of the square beyond this error; None is the square.
        ent_coef: Weight of the entropy bonus.
        loss_aggregation: ``token`` averages over valid tokens, ``sequence`` over responses' means.
        microbatch_tokens: Most tokens, prompts included, in one forward and backward; padding
            counts where it is computed (see ``PolicyConfig.padding_free``). None takes a minibatch
            whole. Passes without gradient keep to it too, or to 8192 tokens.
    """

    objective: Literal["clip", "penalty"] = "clip"
    clip_range: float = 0.2
    clip_range_high: float | None = None
    dual_clip: float | None = None
    penalty_coef: float = 1.0
    penalty_target: float = 0.01
    num_update_epochs: int = 4
    update_order: Literal["together", "in_turn"] = "together"
    backward: Literal["together", "in_turn"] = "in_turn"
    extra_critic_epochs: int = 0
    target_kl: float | None = 0.02
    kl_stop_factor: float = 1.0
    advantage: Literal["gae", "rloo", "group"] = "gae"
    drop_flat_prompts: bool = False
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_gae_lambda: float | None = None
    bootstrap_truncated: bool = False
    whiten_advantages: bool = True
    vf_coef: float = 0.5
    value_clip_range: float | None = 0.2
    value_huber_delta: float | None = None
    ent_coef: float = 0.0
    loss_aggregation: Literal["token", "sequence"] = "token"
    microbatch_tokens: int | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        require_within("clip_range", self.clip_range, *CLIP_RANGES)
        require_within("penalty_coef", self.penalty_coef, *PENALTY_COEFS)
        require_at_least("num_update_epochs", self.num_update_epochs, 1)
        require_at_least("extra_critic_epochs", self.extra_critic_epochs, 0)
        require_at_least("microbatch_tokens", self.microbatch_tokens, 1)
        for name in ("clip_range_high", "penalty_target", "target_kl"):
            require_positive(name, getattr(self, name))
        for name in ("kl_stop_factor", "value_clip_range", "value_huber_delta"):
            require_positive(name, getattr(self, name))
        for name in ("gamma", "gae_lambda", "value_gae_lambda"):
            require_within(name, getattr(self, name), 0, 1)
        require_at_least("vf_coef", self.vf_coef, 0)
        require_at_least("ent_coef", self.ent_coef, 0)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"`dual_clip` must be above 1, got {self.dual_clip}.",
        )

        require(
            self.advantage == "gae"
            or (self.extra_critic_epochs == 0 and self.update_order == "together"),
            f"`advantage: {self.advantage}` has no use for a critic: leave `extra_critic_epochs` "
            "and `update_order` out.",
        )

    @property
    def kl_limit(self) -> float | None:
        """KL(old‖new), nats per token, above which a step is not taken."""
        return None if self.target_kl is None else self.kl_stop_factor * self.target_kl
