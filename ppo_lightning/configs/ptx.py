"""Language modelling on texts beside PPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppo_lightning.configs.checks import require, require_at_least, require_fields
from ppo_lightning.configs.inline import InlineRecord


@dataclass(frozen=True, kw_only=True)
class PTXConfig:
    """PPO-ptx: the actor's steps also lower −log p of texts or answers, in the same gradient.

    Keeps what pre-training or supervised fine-tuning taught (Ouyang et al. 2022, arXiv:2203.02155,
    eq. 2).

    Args:
        texts: Path to a ``.txt`` file (a text a line) or ``.jsonl`` file (under ``prompt``), or the
            texts themselves: all of them is learned.
        demonstrations: Instead of texts: what ``SFTDataModule`` takes, of which the answers are
            learned. Longer ones than ``max_length`` lose their end.
        coef: Weight of the mean −log p of a token; 0 turns it off.
        batch_size: Texts or demonstrations in each of the actor's steps, over all ranks.
        max_length: Longer texts are cut into pieces of this many tokens.
        every_n_iterations: Only in each n-th iteration.
    """

    texts: str | Sequence[str] = ()
    demonstrations: str | Sequence[InlineRecord] = ()
    coef: float = 1.0
    batch_size: int = 8
    max_length: int = 128
    every_n_iterations: int = 1

    def __post_init__(self) -> None:
        require_fields(self)
        require(
            (len(self.texts) > 0) != (len(self.demonstrations) > 0),
            "give either `texts` or `demonstrations`: the name of a file, or what is in it.",
        )
        require_at_least("coef", self.coef, 0)
        require_at_least("batch_size", self.batch_size, 1)
        require_at_least("max_length", self.max_length, 2)
        require_at_least("every_n_iterations", self.every_n_iterations, 1)
