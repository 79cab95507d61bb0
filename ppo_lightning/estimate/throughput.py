"""How long an iteration takes on given hardware, and the tokens that come of it.

A plan, not a measurement: products at an attained share of the peak, decoding at the speed of the
memory, collectives at the speed of the links. Left out are the products of attention (a few
percent below some thousand tokens), the host, rewards that are no networks, and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_lightning.estimate.hardware import Hardware
from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.sizes import NetworkSize, Sizes
from ppo_lightning.estimate.traffic import Traffic
from ppo_lightning.estimate.work import Work


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of an iteration, by stage.

    Args:
        rollout: Reading the prompts and decoding.
        scoring: Actor, critic, reference and learned rewards.
        update: All update epochs.
    """

    rollout: float
    scoring: float
    update: float

    @property
    def total(self) -> float:
        """Of the whole iteration: the stages follow one another."""
        return self.rollout + self.scoring + self.update


def training_flops(parameters: float, tokens: float, *, trained: bool, recomputed: bool) -> float:
    """Products and sums of forward and backward.

    Args:
        parameters: N, of the network.
        tokens: That pass through.
        trained: Whether all weights are: 6·N a token; under adapters the gradients of the weights
            are left out, and 4·N remain.
        recomputed: Whether the forward pass is made twice: 2·N more.

    Source:
        Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    return (6 if trained else 4) * parameters * tokens + (2 * parameters * tokens) * recomputed


def scoring_flops(parameters: float, tokens: float) -> float:
    """Products and sums of a forward pass: 2·N a token.

    Args:
        parameters: N, of the network.
        tokens: That pass through.

    Source:
        Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    return 2 * parameters * tokens


def decode_step_seconds(
    *,
    weights: float,
    parameters: float,
    cache: float,
    rows: int,
    flops: float,
    memory_bandwidth: float,
) -> float:
    """Seconds of one token for each of some responses.

    All weights and the keys and values of all tokens so far are read once; the larger of reading
    the weights and of computing with them counts.

    Args:
        weights: Bytes.
        parameters: N.
        cache: Bytes of keys and values, of all rows.
        rows: Responses that are decoded together.
        flops: Attained, a second.
        memory_bandwidth: Attained, bytes a second.

    Source:
        Pope et al. 2022, arXiv:2211.05102, section 2.
    """
    computed = scoring_flops(parameters, rows) / flops
    return max(weights / memory_bandwidth, computed) + cache / memory_bandwidth


def seconds(
    run: Run,
    sizes: Sizes,
    work: Work,
    sent: Traffic,
    hardware: Hardware,
    *,
    kv_bytes: float,
) -> Seconds:
    """Predict the time of an iteration.

    Weights and gradients travel while something is computed, so the longer of the two counts; for
    the rollout, and between ranks that share a layer, nothing can be computed meanwhile.

    Args:
        run: With its strategy.
        sizes: Of the networks.
        work: Of a rank.
        sent: Bytes of a rank.
        hardware: Peaks and shares.
        kv_bytes: Of keys and values that a rank keeps of one token.
    """
    tensor = run.strategy.tensor
    data_link = hardware.link(run.data_ranks, apart=tensor)
    tensor_link = hardware.link(tensor)
    flops = _flops(run, hardware)
    scored = sum(
        scoring_flops(size.parameters, work.tokens) for size in (*sizes.scoring, *sizes.rewards)
    )
    sums = _sums_of(sizes.scoring) * work.scoring_passes * hardware.latency * (tensor > 1)
    return Seconds(
        rollout=_rollout(run, sizes.actor, work, hardware, kv_bytes)
        + (sent.rollout + sent.push) / data_link
        + sent.tensor_rollout / tensor_link,
        scoring=max(scored / flops, sent.scoring / data_link)
        + sent.tensor_scoring / tensor_link
        + sums,
        update=max(_update_flops(run, sizes, work) / flops, sent.update / data_link)
        + sent.tensor_update / tensor_link,
    )


def _flops(run: Run, hardware: Hardware) -> float:
    half = run.mixed_dtype is not None or run.policy.dtype in ("bfloat16", "float16")
    return (hardware.flops if half else hardware.flops_float32) * hardware.flops_share


def _sums_of(networks: tuple[NetworkSize, ...]) -> int:
    return 2 * sum(size.blocks for size in networks)


def _update_flops(run: Run, sizes: Sizes, work: Work) -> float:
    again = run.policy.gradient_checkpointing is True
    adapted = run.policy.lora is not None
    actor = training_flops(
        sizes.actor.parameters, work.tokens, trained=not adapted, recomputed=again
    )
    if sizes.critic is None:
        return (work.epochs + work.critic_epochs) * actor
    critic = training_flops(
        sizes.critic.parameters,
        work.tokens,
        trained=True,
        recomputed=run.critic_model.gradient_checkpointing is True,
    )
    return work.epochs * (actor + critic) + work.critic_epochs * critic


def _rollout(
    run: Run, actor: NetworkSize, work: Work, hardware: Hardware, kv_bytes: float
) -> float:
    """Read the prompts, then decode wave by wave; half of a response is there on average."""
    flops = _flops(run, hardware)
    prompts = scoring_flops(actor.parameters, work.responses * work.prompt_tokens) / flops
    kept = work.prompt_tokens + work.response_tokens / 2
    step = decode_step_seconds(
        weights=actor.weights,
        parameters=actor.parameters,
        cache=work.at_once * kept * kv_bytes,
        rows=work.at_once,
        flops=flops,
        memory_bandwidth=hardware.memory_bandwidth * hardware.memory_bandwidth_share,
    )
    if run.strategy.tensor > 1:
        step += _sums_of((actor,)) * hardware.latency
    return prompts + work.waves * work.response_tokens * step
