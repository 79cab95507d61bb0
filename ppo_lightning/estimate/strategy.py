"""How the ranks of a run share its weights, gradients and optimiser states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppo_lightning.configs.checks import require, require_at_least

Kind = Literal["single", "ddp", "fsdp", "deepspeed"]

_STAGES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What is cut over the ranks that read different responses.

    Args:
        kind: ``single`` and ``ddp`` keep everything on every rank. ``fsdp`` is FSDP2: weights,
            gradients and states are cut, a block is put together while it computes, the actor as
            a whole while it samples.
        stage: Of ``deepspeed``: ZeRO 1 cuts the states, 2 the gradients as well, 3 the weights too.
        tensor: Ranks that compute each layer together (tensor parallel), with ``fsdp``. They read
            the same responses.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Shoeybi et al. 2019, arXiv:1909.08053
        (tensor parallel).
    """

    kind: Kind = "single"
    stage: int = 0
    tensor: int = 1

    def __post_init__(self) -> None:
        require_at_least("tensor", self.tensor, 1)
        if self.kind == "deepspeed":
            require(
                self.stage in _STAGES,
                f"`stage` of DeepSpeed must be 1, 2 or 3, got {self.stage}.",
            )
        else:
            require(self.stage == 0, f"`stage` is DeepSpeed's; `{self.kind}` has none.")
        require(
            self.tensor == 1 or self.kind == "fsdp",
            f"tensor parallel goes with `fsdp`, not with `{self.kind}`: set "
            "`--trainer.strategy fsdp`, or leave it out.",
        )

    @property
    def name(self) -> str:
        """As a table calls it."""
        if self.kind == "deepspeed":
            return f"deepspeed_stage_{self.stage}"
        return f"{self.kind}, tensor {self.tensor}" if self.tensor > 1 else self.kind

    @property
    def cuts_states(self) -> bool:
        """Whether each rank keeps a part of the optimiser states."""
        return self.kind == "fsdp" or self.stage >= 1

    @property
    def cuts_gradients(self) -> bool:
        """Whether each rank keeps a part of the gradients."""
        return self.kind == "fsdp" or self.stage >= 2

    @property
    def cuts_weights(self) -> bool:
        """Whether each rank keeps a part of the weights."""
        return self.kind == "fsdp" or self.stage == 3


def strategy_of(name: str, *, ranks: int, tensor: int = 1) -> Strategy:
    """Read a strategy's name as the Trainer takes it.

    Args:
        name: ``auto``, ``ddp``, ``fsdp``, ``deepspeed`` (which is stage 2) or
            ``deepspeed_stage_1`` to ``_3``.
        ranks: ``auto`` is a single process, or DDP on several.
        tensor: See ``Strategy``.

    Raises:
        ValueError: Another name.
    """
    stages = {f"deepspeed_stage_{stage}": stage for stage in _STAGES} | {"deepspeed": 2}
    if name in stages:
        return Strategy(kind="deepspeed", stage=stages[name], tensor=tensor)
    if name == "auto":
        return Strategy(kind="single" if ranks == 1 else "ddp", tensor=tensor)
    if name == "ddp":
        return Strategy(kind="ddp", tensor=tensor)
    if name == "fsdp":
        return Strategy(kind="fsdp", tensor=tensor)
    known = ", ".join(("auto", "ddp", "fsdp", *stages))
    raise ValueError(f"`trainer.strategy: {name}` cannot be estimated: set one of {known}.")
