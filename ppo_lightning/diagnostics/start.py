"""Whether a run starts from the models that it should: told from its first buffer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from ppo_lightning.diagnostics.advice import Advice

SAME_START = 0.1
"""Nats per response up to which actor and reference count as the same model."""

SAME_START_PER_TOKEN = 5e-4
"""Nats per token up to which they do: what rounding to bfloat16 leaves between copies."""

_SHOWN = 8  # hexadecimal digits of a fingerprint


@dataclass(frozen=True, kw_only=True)
class Start:
    """The actor and the reference before the first update.

    Args:
        kl_ref: KL(actor ‖ reference) over the first buffer, all ranks, by k3, which is less noisy
            than k1 and never negative; nats per response.
        num_responses: In the buffer.
        mean_length: Tokens per response.
        policy: Path of the actor's model.
        policy_fingerprint: Of its weights; empty if unknown.
        reference: Path of the reference's model; None where it is the actor's own.
        reference_fingerprint: Of its weights; empty if unknown.
    """

    kl_ref: float
    num_responses: int
    mean_length: float
    policy: str
    policy_fingerprint: str = ""
    reference: str | None = None
    reference_fingerprint: str = ""


@dataclass(frozen=True, kw_only=True)
class TextReader:
    """A model as something that reads text, and where it comes from.

    Args:
        path: As the config gives it.
        lineage: Fingerprints of its weights and of all models that it was made from.
        tokenizer: Digest of its vocabulary; empty if unknown.
        chat_template: Digest of its template; empty without one.
    """

    path: str
    lineage: Collection[str] = ()
    tokenizer: str = ""
    chat_template: str = ""


@dataclass(frozen=True, kw_only=True)
class RewardOrigin:
    """What a reward model that was trained here says of itself.

    Args:
        name: Of the component in the run's list.
        model: The reward model, as it was when it had been trained.
        sft_path: Path of the SFT model that it was made from; empty if it was made from another.
        sft_fingerprint: Of that model's weights.
        changed: What of its folder is no longer as it was then: ``weights``, ``chat template``.
    """

    name: str
    model: TextReader
    sft_path: str = ""
    sft_fingerprint: str = ""
    changed: Collection[str] = field(default=())


def review_start(start: Start) -> list[Advice]:
    """Look at the KL between actor and reference where it should still be 0.

    Returns:
        Nothing for an actor that is the reference, in whatever form its weights were given.
    """
    most = max(SAME_START, SAME_START_PER_TOKEN * start.mean_length)
    if not start.kl_ref > most:
        return []
    kl = (
        f"KL before the first update is {start.kl_ref:.3g} nats per response "
        f"({start.num_responses} responses)"
    )
    if start.reference is None:
        message = (
            f"is not set, so the reference is the actor as it began, and yet the {kl}: the model "
            "does not say the same twice. Set `policy.attn_implementation: eager`, or a finer "
            "`reference.dtype`."
        )
        return [Advice(key="reference.path", message=message)]
    message = (
        f"is `{start.reference}` ({_weights(start.reference_fingerprint)}), and the actor is not "
        f"that model: it began as `{start.policy}` ({_weights(start.policy_fingerprint)}), and the "
        f"{kl} instead of 0, so the penalty pulls from the first step. Set `policy.path` to "
        f"`{start.reference}`, or leave `reference.path` out."
    )
    return [Advice(key="reference.path", message=message)]


def review_reward_origin(reward: RewardOrigin, policy: TextReader) -> list[Advice]:
    """Look whether a reward model was trained for the policy that it is to judge.

    A reward model of another family, with a tokenizer and template of its own, is fine: text is
    rendered anew for it. One that says it was made from an SFT model should judge that model.

    Args:
        reward: The reward model.
        policy: As the actor began.
    """
    key = f"rewards[{reward.name}].path"
    found = []
    stranger = reward.sft_fingerprint and policy.lineage
    if stranger and reward.sft_fingerprint not in policy.lineage:
        own = next(iter(policy.lineage))
        message = (
            f"is `{reward.model.path}`, a reward model made from the SFT model `{reward.sft_path}` "
            f"({_weights(reward.sft_fingerprint)}), and the actor began as another one, "
            f"`{policy.path}` ({_weights(own)}): it has not been trained on what this policy "
            f"writes. Set `policy.path` to `{reward.sft_path}`, or train the reward model from "
            f"`{policy.path}`."
        )
        found.append(Advice(key=key, message=message))
    elif _other_template(reward.model, policy):
        message = (
            f"is `{reward.model.path}`, which has the policy's vocabulary and was trained on chats "
            f"of another template (digest {_short(reward.model.chat_template)}) than that of "
            f"`{policy.path}` ({_short(policy.chat_template)}). Train it from the model that the "
            "policy begins with, so that the template travels along."
        )
        found.append(Advice(key=key, message=message))
    if reward.changed:
        message = (
            f"is `{reward.model.path}`, whose {' and '.join(reward.changed)} are others than those "
            "that `ppo_lightning.json` was written for: it may not score as it did when it was "
            "tested. `ppo-lightning check-reward` tests it again."
        )
        found.append(Advice(key=key, message=message, severity="note"))
    return found


def _other_template(reward: TextReader, policy: TextReader) -> bool:
    same_words = reward.tokenizer == policy.tokenizer != ""
    return same_words and "" != reward.chat_template != policy.chat_template != ""


def _weights(fingerprint: str) -> str:
    return f"weights {_short(fingerprint)}" if fingerprint else "weights unknown"


def _short(digest: str) -> str:
    return digest[:_SHOWN]
