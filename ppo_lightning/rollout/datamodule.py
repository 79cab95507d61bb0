"""The data module of PPO: prompts in, a fresh on-policy buffer for every iteration out."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ppo_lightning.configs import BufferConfig
from ppo_lightning.configs.checks import require, require_at_least
from ppo_lightning.data import (
    Likeness,
    PromptFeed,
    PromptReader,
    Prompts,
    PromptSet,
    PromptSource,
    SplitPrompts,
    as_source,
    make_prompt_batch,
    warn_of_overlap,
)
from ppo_lightning.distributed import all_reduce_sum, num_replicas, owned_indices, replica
from ppo_lightning.errors import ConfigError
from ppo_lightning.functional import combine_keys
from ppo_lightning.rollout.base_datamodule import ValidationSwitch
from ppo_lightning.rollout.loader import HeldOutLoader, RolloutLoader
from ppo_lightning.rollout.source import LookAheadSource, RolloutSource
from ppo_lightning.types import Experience, PromptBatch

log = logging.getLogger(__name__)

_MOST_PROMPTS = 16
"""A buffer sized in tokens has at most this many times ``num_prompts``: responses may become very
short."""

_HELD_OUT = -1  # stands where training keys have the iteration


class RolloutDataModule(ValidationSwitch):
    """Prompts, and the loop that turns them into a buffer once an iteration.

    Args:
        prompts: Training prompts.
        val_prompts: Held-out prompts for validation, ``test`` and ``predict``.
        buffer: Size of the buffer and number of minibatches.
        chat: Whether plain strings become one user turn of the tokenizer's chat template:
            ``auto`` does so where the tokenizer has a template.
        system_prompt: System turn in front of every chat that has none.
        max_prompt_tokens: Longest prompt; None leaves it to the model's positions.
        overlong: What happens to a longer one: ``error``, ``drop`` or ``truncate`` (its start).
        deduplicate: Leaves out prompts that came before: the same text (``exact``), or but for case
            and white space (``normalized``). None keeps them.
        val_share: Holds this share of ``prompts`` out, chosen by a hash of the text (see
            ``SplitPrompts``), in the place of ``val_prompts``.
        val_batch_size: Held-out prompts answered at once on a rank.
        seed: Of prompt order, sampling and shuffles; None takes ``seed_everything``'s, or 0.
    """

    def __init__(
        self,
        prompts: Prompts,
        val_prompts: Prompts | None = None,
        *,
        buffer: BufferConfig = BufferConfig(),  # noqa: B008 - frozen
        chat: Literal["auto"] | bool = "auto",
        system_prompt: str | None = None,
        max_prompt_tokens: int | None = None,
        overlong: Literal["error", "drop", "truncate"] = "error",
        deduplicate: Likeness | None = None,
        val_share: float | None = None,
        val_batch_size: int = 64,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.prompts, self.val_prompts = _parts(prompts, val_prompts, val_share)
        self.buffer = buffer
        self.chat = chat
        self.system_prompt = system_prompt
        self.max_prompt_tokens = max_prompt_tokens
        require(
            overlong in ("error", "drop", "truncate"),
            f"`overlong` must be one of error, drop, truncate, got {overlong!r}.",
        )
        require_at_least("val_batch_size", val_batch_size, 1)
        require(
            deduplicate in (None, "exact", "normalized"),
            f"`deduplicate` must be one of exact, normalized, null, got {deduplicate!r}.",
        )
        self.overlong = overlong
        self.deduplicate = deduplicate
        self.val_batch_size = val_batch_size
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self.position = 0
        self.tokens_per_prompt = 0.0
        self.prompts_ahead = 0
        self.train_set: PromptFeed | None = None
        self.val_set: PromptSet | None = None

    @property
    def source(self) -> RolloutSource:
        """The module that samples and scores."""
        module = getattr(self.trainer, "lightning_module", None)
        if not isinstance(module, RolloutSource):
            raise TypeError(
                f"RolloutDataModule needs a module with `collect`, such as PPOModule, "
                f"got {type(module).__name__}."
            )
        return module

    def setup(self, stage: str) -> None:
        """Read and tokenise the prompts: a bad file ends the run before weights are loaded."""
        if stage == "fit":
            self._refuse_idle_ranks()
            self.train_set = self.prompts.feed(self._reader())
        if self.val_prompts is not None:
            self.val_set = PromptSet.of(self.val_prompts, self._reader())
            if self.train_set is not None:
                warn_of_overlap(self.train_set, self.val_set)
        elif stage != "fit":
            named = getattr(stage, "value", stage)  # of an enum, whose text differs with Python's
            raise ConfigError(
                f"`{named}` answers held-out prompts: set `data.init_args.val_prompts`."
            )
        else:
            self.switch_validation_off()  # an empty loader would be warned about

    def _refuse_idle_ranks(self) -> None:
        ranks = num_replicas()
        if self.buffer.num_responses < ranks:
            raise ConfigError(
                f"a buffer of {self.buffer.num_responses} responses cannot be shared by {ranks} "
                "ranks: raise `data.init_args.buffer.num_prompts`, or use fewer devices."
            )

    def _reader(self) -> PromptReader:
        return PromptReader(
            tokenizer=self.source.tokenizer,
            chat=self.chat,
            system_prompt=self.system_prompt,
            max_prompt_tokens=self._longest_prompt(),
            overlong=self.overlong,
            deduplicate=self.deduplicate,
        )

    def _longest_prompt(self) -> int | None:
        """The configured limit, or else what the model's positions leave beside a response."""
        room = self.source.max_prompt_tokens
        wanted = self.max_prompt_tokens
        if room is not None and (room < 1 or (wanted is not None and wanted > room)):
            asked = "" if wanted is None else f"`data.init_args.max_prompt_tokens` ({wanted}) and "
            raise ConfigError(
                f"{asked}`model.init_args.sampling.max_new_tokens` exceed the positions of "
                f"`{self.source.shortest_model}`, which leave {room} for a prompt beside a whole "
                "response: lower one of them."
            )
        return room if wanted is None else wanted

    def train_dataloader(self) -> RolloutLoader:
        """A loader whose every ``iter`` is one iteration."""
        return RolloutLoader(
            self._next_experience,
            num_minibatches=self.buffer.num_minibatches,
            num_epochs=self.source.num_passes,
            seed=self.seed,
            together=self.buffer.together,
        )

    def _next_experience(self) -> Experience:
        """Take the next prompts of the seeded order and have them answered."""
        assert self.train_set is not None
        assert self.trainer is not None
        iteration = self.trainer.current_epoch
        source = self.source
        source.begin_iteration(iteration)
        ahead = source if isinstance(source, LookAheadSource) and source.looks_ahead else None
        # What is sampled ahead was sized an iteration ago; its prompts are taken again.
        num_prompts = (self.prompts_ahead if ahead else 0) or self.num_prompts
        batch, position = self._batch(iteration, self.position, num_prompts)
        self.prompts_ahead = self.num_prompts if ahead else 0
        if ahead is not None:
            following, _ = self._batch(iteration + 1, position, self.prompts_ahead)
            ahead.prefetch(following, iteration=iteration + 1)
        total = num_prompts * self.buffer.responses_per_prompt
        experience = source.collect(batch, iteration=iteration, num_responses=total)
        self.position = position
        written = all_reduce_sum(experience.sequences.response_mask.sum().double().view(1))
        self.tokens_per_prompt = float(written) / num_prompts
        return experience

    def _batch(self, iteration: int, position: int, num_prompts: int) -> tuple[PromptBatch, int]:
        """Make this rank's prompts of an iteration, and say where the next ones begin."""
        assert self.train_set is not None
        total = num_prompts * self.buffer.responses_per_prompt
        # All ranks take all prompts, so that they agree on what a stream leaves out.
        taken = self.train_set.take(position, num_prompts, seed=self.seed)
        indices = owned_indices(total, owner=replica(), owners=num_replicas())
        groups = indices // self.buffer.responses_per_prompt
        batch = make_prompt_batch(
            taken,
            groups.tolist(),
            keys=_keys(self.seed, iteration, indices),
            indices=indices,
            groups=groups,
            pad_id=self.source.tokenizer.pad_token_id,
        )
        return batch, taken.position

    @property
    def num_prompts(self) -> int:
        """Prompts of the next buffer, over all ranks."""
        wanted: float = self.buffer.num_prompts
        if self.buffer.num_tokens is not None and self.tokens_per_prompt > 0:
            most = wanted * _MOST_PROMPTS
            wanted = min(self.buffer.num_tokens / self.tokens_per_prompt, most)
        wanted *= self.source.num_prompts_factor
        responses = max(self.buffer.num_minibatches * self.buffer.together, num_replicas())
        return max(round(wanted), math.ceil(responses / self.buffer.responses_per_prompt))

    def val_dataloader(self) -> HeldOutLoader | list[Any]:
        """Held-out prompts of this rank, each once."""
        if self.val_set is None:
            return []
        owned = owned_indices(len(self.val_set), owner=replica(), owners=num_replicas())
        # A rank without prompts yields one empty batch: Lightning refuses an empty loader.
        parts = torch.split(owned, self.val_batch_size)
        return HeldOutLoader([self._held_out_batch(part) for part in parts])

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def _held_out_batch(self, numbers: Tensor) -> PromptBatch:
        assert self.val_set is not None
        return make_prompt_batch(
            self.val_set,
            numbers.tolist(),
            keys=_keys(self.seed, _HELD_OUT, numbers),
            indices=numbers,
            groups=numbers,
            pad_id=self.source.tokenizer.pad_token_id,
        )

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompt order, and the seed that all random numbers come from.

        ``chat`` and ``system_prompt`` are for whom samples the checkpoint; a resumed run has its
        own. ``prompts`` tells whether these are still the same.
        """
        return {
            "position": self.position,
            "tokens_per_prompt": self.tokens_per_prompt,
            "prompts_ahead": self.prompts_ahead,
            "seed": self.seed,
            "chat": self.chat,
            "system_prompt": self.system_prompt,
            "prompts": None if self.train_set is None else list(self.train_set.fingerprint()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint stopped, with its seed."""
        self.position = int(state_dict["position"])
        self.tokens_per_prompt = float(state_dict["tokens_per_prompt"])
        self.prompts_ahead = int(state_dict.get("prompts_ahead", 0))
        self.seed = int(state_dict["seed"])
        before = state_dict.get("prompts")
        if before is not None and self.train_set is not None:
            _warn_of_other_prompts(before, self.train_set.fingerprint())


def _parts(
    prompts: Prompts, val_prompts: Prompts | None, val_share: float | None
) -> tuple[PromptSource, PromptSource | None]:
    """Return training and held-out prompts."""
    source = as_source(prompts)
    if val_share is None:
        return source, None if val_prompts is None else as_source(val_prompts)
    require(val_prompts is None, "`val_share` holds prompts out itself: leave out `val_prompts`.")
    require(0 < val_share < 1, f"`val_share` must lie above 0 and below 1, got {val_share}.")
    parts: tuple[Literal["train"], Literal["validation"]] = ("train", "validation")
    train, held_out = (SplitPrompts(source, part, val_share) for part in parts)
    return train, held_out


def _warn_of_other_prompts(before: Sequence[Any], now: Sequence[Any]) -> None:
    """Warn that a position counts other prompts; see ``PromptFeed.fingerprint``."""
    (count_before, digest_before), (count, digest) = before, now
    known = bool(digest_before and digest)
    if count != count_before or (known and digest != digest_before):
        log.warning(
            "the training prompts are not those that the checkpoint was made with (%d now, %d "
            "then): the run goes on in another order, in which some may come again or not at all.",
            count,
            count_before,
        )


def _keys(seed: int, iteration: int, indices: Tensor) -> Tensor:
    """Random-number key of each response. ``[B]`` long."""
    return torch.as_tensor(combine_keys(seed, iteration, indices))
