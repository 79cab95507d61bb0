"""Which settings make a run smaller, and the cheapest of them that make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppo_lightning.configs import CriticConfig, LoraConfig
from ppo_lightning.estimate.memory import Estimate
from ppo_lightning.estimate.process import MAPPING
from ppo_lightning.estimate.run import Run
from ppo_lightning.estimate.strategy import Strategy

_MODEL = "model.init_args."
_BLOCKS = 128 * 1024


@dataclass(frozen=True)
class Change:
    """A smaller run.

    Args:
        run: With the change.
        settings: What is set, by its key in the config; a name in capitals is one of the
            environment.
        price: What is lost.
    """

    run: Run
    settings: Mapping[str, str]
    price: str


Step = Callable[[Run], Change | None]
"""Makes a run smaller; None where it is so already."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """How a run is made to fit.

    Args:
        alone: Each change with the bytes that it saves by itself, cheapest first.
        together: The cheapest changes that make it fit; None where all together do not.
        total: Peak with those, or with all, in bytes.
    """

    alone: tuple[tuple[Change, int], ...]
    together: tuple[Change, ...] | None
    total: int


def find_fit(run: Run, limit: int, estimator: Callable[[Run], Estimate]) -> Fitting:
    """Say what to change in a run that takes more than there is.

    Args:
        run: As it is.
        limit: Bytes that there are.
        estimator: Predicts each of the runs that are tried.
    """

    def size(run: Run) -> int:
        return estimator(run).peak.total

    now = size(run)
    alone = [(change, now - size(change.run)) for step in STEPS if (change := step(run))]
    taken = _until_it_fits(run, limit, size)
    total = size(_changed(run, taken)[-1].run) if taken else now
    if total > limit:
        return Fitting(alone=tuple(alone), together=None, total=total)
    for step in reversed(taken[:-1]):  # dearest first: the last may have made it needless
        rest = [other for other in taken if other is not step]
        if size(_changed(run, rest)[-1].run) <= limit:
            taken = rest
    changes = _changed(run, taken)
    return Fitting(alone=tuple(alone), together=tuple(changes), total=size(changes[-1].run))


def _until_it_fits(run: Run, limit: int, size: Callable[[Run], int]) -> list[Step]:
    """Take steps that save something, cheapest first."""
    taken: list[Step] = []
    now = size(run)
    for step in STEPS:
        if now <= limit:
            break
        change = step(run)
        if change is not None and (then := size(change.run)) < now:
            taken.append(step)
            run, now = change.run, then
    return taken


def _changed(run: Run, steps: Sequence[Step]) -> list[Change]:
    """Take some steps one after the other."""
    changes: list[Change] = []
    for step in steps:
        change = step(run)
        if change is not None:
            changes.append(change)
            run = change.run
    return changes


def _map_blocks(run: Run) -> Change | None:
    if run.device != "cpu" or run.mapped:
        return None
    return Change(
        replace(run, mapped=True), {MAPPING: str(_BLOCKS)}, "much slower updates: memory comes anew"
    )


def _smaller_microbatches(parts: int | None) -> Step:
    """Cut a minibatch into so many parts; None reads one sequence at a time."""

    def step(run: Run) -> Change | None:
        row = run.prompt_tokens + run.sampling.max_new_tokens
        whole = run.minibatch_rows * row
        wanted = row if parts is None else max(row, whole // parts)
        if wanted >= min(whole, run.ppo.microbatch_tokens or whole):
            return None
        return Change(
            replace(run, ppo=replace(run.ppo, microbatch_tokens=wanted)),
            {f"{_MODEL}ppo.microbatch_tokens": str(wanted)},
            "the same numbers, slower where a microbatch is small",
        )

    return step


def _backward_in_turn(run: Run) -> Change | None:
    if "in_turn" in (run.ppo.backward, run.ppo.update_order):
        return None
    if run.critic_model.kind == "shared" or run.ranks > 1:
        return None
    return Change(
        replace(run, ppo=replace(run.ppo, backward="in_turn")),
        {f"{_MODEL}ppo.backward": "in_turn"},
        "the same numbers at the same speed",
    )


def _fewer_slots(run: Run) -> Change | None:
    now = min(run.num_responses, run.sampling.batch_size or run.num_responses)
    if now < 2:
        return None
    wanted = -(-now // 4)
    return Change(
        replace(run, sampling=replace(run.sampling, batch_size=wanted)),
        {f"{_MODEL}sampling.batch_size": str(wanted)},
        "the same answers, slower rollouts",
    )


def _fewer_texts(run: Run) -> Change | None:
    if all(model.batch_size == 1 for model in run.rewards):
        return None
    models = [replace(model, batch_size=-(-model.batch_size // 4)) for model in run.rewards]
    key = f"{_MODEL}rewards[{{}}].component.init_args.batch_size"
    settings = {key.format(model.name): str(model.batch_size) for model in models}
    return Change(replace(run, rewards=tuple(models)), settings, "the same scores, slower")


def _checkpointing(run: Run) -> Change | None:
    policy, critic = run.policy, run.critic_model
    separate = critic.kind == "separate"
    settings = {}
    if policy.gradient_checkpointing is not True:
        settings[f"{_MODEL}policy.gradient_checkpointing"] = "true"
    if separate and critic.gradient_checkpointing is not True:
        settings[f"{_MODEL}critic_model.gradient_checkpointing"] = "true"
    if not settings:
        return None
    changed = replace(
        run,
        policy=replace(policy, gradient_checkpointing=True),
        critic_model=replace(critic, gradient_checkpointing=separate),
    )
    return Change(changed, settings, "updates a third slower")


def _fsdp(run: Run) -> Change | None:
    if run.ranks == 1 or run.strategy.cuts_weights:
        return None
    return Change(
        replace(run, strategy=Strategy(kind="fsdp")),
        {"trainer.strategy": "fsdp"},
        "the same numbers up to rounding; weights travel in every pass",
    )


def _tensor(run: Run) -> Change | None:
    wanted = math.gcd(run.tensor_limit, run.ranks)
    if run.strategy.kind != "fsdp" or wanted <= run.strategy.tensor:
        return None
    return Change(
        replace(run, strategy=replace(run.strategy, tensor=wanted)),
        {"tensor-parallel": str(wanted)},
        f"the same numbers up to rounding; {wanted} ranks share each layer, and its responses",
    )


def _offload(run: Run) -> Change | None:
    optimizer = run.optimizer
    if run.device == "cpu" or optimizer.offload or optimizer.name not in ("Adam", "AdamW"):
        return None
    if run.strategy.cuts_states:  # it is for states that a rank has to itself
        return None
    return Change(
        replace(run, optimizer=replace(optimizer, offload=True)),
        {f"{_MODEL}optimizer.offload": "true"},
        "the same numbers up to rounding, slower steps: the CPU takes them",
    )


def _no_frozen_states(run: Run) -> Change | None:
    policy = run.policy
    if not policy.cache_frozen_trunk or policy.lora is None or policy.lora.layers is None:
        return None
    return Change(
        replace(run, policy=replace(policy, cache_frozen_trunk=False)),
        {f"{_MODEL}policy.cache_frozen_trunk": "false"},
        "the same numbers up to rounding, slower updates",
    )


def _reference_on_cpu(run: Run) -> Change | None:
    if run.device == "cpu" or _is_actors(run) or run.reference.device == "cpu":
        return None
    return Change(
        replace(run, reference=replace(run.reference, device="cpu")),
        {f"{_MODEL}reference.device": "cpu"},
        "the same numbers up to rounding, slower scoring: the CPU asks it",
    )


def _is_actors(run: Run) -> bool:
    """Whether the reference is the actor with its adapter off."""
    return run.policy.lora is not None and run.reference.is_start_of(run.policy)


def _half_reference(run: Run) -> Change | None:
    own = run.reference.dtype or run.policy.dtype
    if _is_actors(run) or own in ("bfloat16", "float16"):
        return None
    return Change(
        replace(run, reference=replace(run.reference, dtype="bfloat16")),
        {f"{_MODEL}reference.dtype": "bfloat16"},
        "the KL is off by the reference's rounding",
    )


def _small_reference(run: Run) -> Change | None:
    if _is_actors(run) or run.reference.quantization is not None:
        return None
    return Change(
        replace(run, reference=replace(run.reference, quantization="int8")),
        {f"{_MODEL}reference.quantization": "int8"},
        "the KL is off by the reference's rounding, by more than in bfloat16",
    )


def _mixed(run: Run) -> Change | None:
    if run.precision not in ("32-true", "32"):
        return None
    return Change(
        replace(run, precision="bf16-mixed"),
        {"trainer.precision": "bf16-mixed"},
        "coarser products; much faster where the processor has bfloat16",
    )


def _shared_critic(run: Run) -> Change | None:
    if run.critic_model.kind == "shared":
        return None
    critic = CriticConfig(
        kind="shared",
        head_init=run.critic_model.head_init,
        trunk_grad_scale=run.critic_model.trunk_grad_scale,
    )
    settings = {"kind": "shared", "path": "null"}
    settings |= {
        name: "false"
        for name in ("gradient_checkpointing", "compile")
        if getattr(run.critic_model, name)
    }
    return Change(
        replace(run, critic_model=critic),
        {f"{_MODEL}critic_model.{name}": value for name, value in settings.items()},
        "another training: the value loss moves the policy's trunk",
    )


def _adapters(run: Run) -> Change | None:
    if run.policy.lora is not None:
        return None
    return Change(
        replace(run, policy=replace(run.policy, lora=LoraConfig())),
        {f"{_MODEL}policy.lora": "{}"},
        "another training: adapters learn less, and want a higher rate",
    )


def _half_base(run: Run) -> Change | None:
    changed, settings = run, {}
    if run.policy.lora is None:
        changed = replace(run, policy=replace(run.policy, lora=LoraConfig()))
        settings[f"{_MODEL}policy.lora"] = "{}"
    if changed.policy.dtype != "float32":
        return None
    critic = run.critic_model
    if critic.kind == "separate" and critic.dtype is None:
        critic = replace(critic, dtype="float32")
        settings[f"{_MODEL}critic_model.dtype"] = "float32"
    settings[f"{_MODEL}policy.dtype"] = "bfloat16"
    changed = replace(
        changed, policy=replace(changed.policy, dtype="bfloat16"), critic_model=critic
    )
    return Change(changed, settings, "another training: adapters on a rounded base")


def _four_bits(run: Run) -> Change | None:
    if run.policy.quantization == "nf4" or run.policy.compile or run.strategy.cuts_weights:
        return None
    policy = replace(run.policy, lora=run.policy.lora or LoraConfig(), quantization="nf4")
    settings = {f"{_MODEL}policy.quantization": "nf4"}
    if run.policy.lora is None:
        settings[f"{_MODEL}policy.lora"] = "{}"
    return Change(
        replace(run, policy=policy),
        settings,
        "another training: adapters on weights of four bits; needs `bitsandbytes`",
    )


STEPS: tuple[Step, ...] = (
    _backward_in_turn,
    _smaller_microbatches(2),
    _smaller_microbatches(4),
    _fewer_slots,
    _fewer_texts,
    _smaller_microbatches(None),
    _checkpointing,
    _no_frozen_states,
    _map_blocks,
    _fsdp,
    _tensor,
    _offload,
    _reference_on_cpu,
    _half_reference,
    _small_reference,
    _mixed,
    _shared_critic,
    _adapters,
    _half_base,
    _four_bits,
)
"""Cheapest first: what changes speed alone, then rounding, then what is trained."""
