"""SFTModule: supervised fine-tuning of a policy on demonstrations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from ppo_lightning.configs import GroupConfig, OptimizerConfig, PolicyConfig, SamplingConfig
from ppo_lightning.configs.checks import require_at_least
from ppo_lightning.data.demonstrations.packing import (
    TokenRows,
    packed_rows,
    padded_rows,
    row_groups,
    token_rows,
)
from ppo_lightning.data.demonstrations.sft_datamodule import ExampleBatch
from ppo_lightning.metrics import SFTStats, StepStats
from ppo_lightning.models import (
    add_end_id,
    base_causal_lm,
    build_policy,
    check_packing,
    check_vocabulary,
    folder_end_ids,
    learned_scores,
    load_tokenizer,
    position_limit,
    save_model,
    use_template,
)
from ppo_lightning.modules.stages import call_listeners
from ppo_lightning.modules.supervised import Dropout, SupervisedModule
from ppo_lightning.modules.written import WrittenAnswer, WrittenAnswers
from ppo_lightning.rollout import NativeEngine, StopRules, completions_of
from ppo_lightning.types import PromptBatch


class SFTModule(SupervisedModule):
    """Train a causal language model to write what demonstrations show.

    One ``training_step`` is one optimiser step over ``data.init_args.batch_size`` demonstrations.
    The loss is −log p of the answers' tokens, a mean over all of them in the step. Weights are
    loaded in ``configure_model``.

    Args:
        policy: The model that is trained: all of it, or adapters (``lora``).
        actor: Learning rate.
        optimizer: The optimiser.
        microbatch_tokens: Most tokens of one backward pass, padding included; None is one pass a
            step.
        packing: Put several demonstrations in a row as long as the longest one; they do not see
            each other. The result is the same, with less padding.
        chat_template: For a tokenizer without one, or instead of its own: ``chatml``, the path of
            a Jinja file, or its text. It is saved with the model.
        dropout: ``off``, or ``keep`` for what the model's folder says.
        sampling: Length of the answers to held-out prompts; they are greedy.
        num_texts: Held-out prompts that are answered at each validation.
        max_skipped_steps: The run ends after this many steps in a row whose loss or gradient was
            not finite.
    """

    kind: ClassVar[str] = "sft"
    stats_class: ClassVar[type[StepStats]] = SFTStats
    sums: ClassVar[tuple[str, ...]] = ("correct", "read", "computed")

    def __init__(
        self,
        policy: PolicyConfig,
        *,
        actor: GroupConfig = GroupConfig(lr=2e-5),  # noqa: B008 - frozen, as are those below
        optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8),  # noqa: B008
        microbatch_tokens: int | None = 8192,
        packing: bool = False,
        chat_template: str | None = None,
        dropout: Dropout = "off",
        sampling: SamplingConfig = SamplingConfig(),  # noqa: B008
        num_texts: int = 4,
        max_skipped_steps: int = 5,
    ) -> None:
        super().__init__(
            groups={"actor": actor},
            optimizer=optimizer,
            microbatch_tokens=microbatch_tokens,
            max_skipped_steps=max_skipped_steps,
            dropout=dropout,
        )
        require_at_least("num_texts", num_texts, 0)
        self.policy = policy
        self.packing = packing
        self.chat_template = chat_template
        self.sampling = sampling
        self.num_texts = num_texts

    # ------------------------------------------------------------------ what the data module asks

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, with the chat template in force."""
        found = load_tokenizer(self.policy.path, trust_remote_code=self.policy.trust_remote_code)
        if self.chat_template is not None:
            use_template(found, self.chat_template)
        return found

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends a response."""
        return folder_end_ids(self.policy, self.tokenizer)

    @cached_property
    def max_positions(self) -> int | None:
        """Most tokens that the policy can read; None is unlimited."""
        return position_limit(self.policy)

    # ------------------------------------------------------------------ network and loss

    @override
    def build_network(self) -> nn.Module:
        network = build_policy(self.policy, keep_dropout=self.dropout == "keep")
        base = base_causal_lm(network)
        check_vocabulary(self.tokenizer, {"actor": base})
        if self.chat_template is not None:
            add_end_id(base, int(self.tokenizer.eos_token_id))
        if self.packing:
            check_packing(base, longest=self._longest_example())
        return network

    def _longest_example(self) -> int:
        data = getattr(self._trainer, "datamodule", None)
        parts = [getattr(data, name, ()) for name in ("train_examples", "val_examples")]
        return max((len(example) for part in parts for example in part), default=0)

    @override
    def parts(self, batch: ExampleBatch) -> list[TokenRows]:
        examples = batch.examples
        rows = packed_rows(examples) if self.packing else padded_rows(examples)
        groups = row_groups(rows, examples, self.microbatch_tokens)
        return [token_rows(g, examples, packed=self.packing).to(self.device) for g in groups]

    @override
    def idle_part(self, batch: ExampleBatch) -> TokenRows:
        nothing = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        return TokenRows(
            ids=nothing,
            learned=nothing.bool(),
            segments=nothing + 1,
            positions=nothing,
            packed=self.packing,
        )

    @override
    def count(self, batch: ExampleBatch) -> Tensor:
        return torch.tensor(sum(example.num_learned for example in batch.examples))

    @override
    def loss_sum(self, part: TokenRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert self.network is not None
        found = learned_scores(
            self.network,
            ids=part.ids,
            learned=part.learned,
            segments=part.segments,
            positions=part.positions,
            packed=part.packed,
        )
        read = (part.segments > 0).sum()
        computed = read.new_tensor(part.ids.numel())
        sums = {"correct": found.correct.sum(), "read": read, "computed": computed}
        return -found.logprobs.sum(), sums

    @override
    def train_values(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        return {
            "token_accuracy": totals["correct"] / totals["count"],
            "tokens": totals["count"],
            "padding_share": 1 - totals["read"] / totals["computed"],
            "tokens_per_second": totals["read"] / totals["seconds"],
        }

    @override
    def val_values(self, totals: Mapping[str, float]) -> dict[str, float | None]:
        nll = totals["loss"] / totals["count"]
        return {
            "val_perplexity": math.exp(min(nll, 700.0)),
            "val_token_accuracy": totals["correct"] / totals["count"],
            "val_tokens": totals["count"],
        }

    # ------------------------------------------------------------------ answers to read

    @override
    def configure_callbacks(self) -> list[pl.Callback]:
        return [*super().configure_callbacks(), WrittenAnswers()]

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._write_answers()

    @override
    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._write_answers()

    def _write_answers(self) -> None:
        """Answer the first held-out prompts; every rank answers its share."""
        data: Any = getattr(self.trainer, "datamodule", None)
        trial_run: bool = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if trial_run or self.trainer.sanity_checking or not hasattr(data, "prompt_batch"):
            return
        batch = data.prompt_batch(range(min(self.num_texts, data.num_prompts)))
        call_listeners(self, "on_written_answers", self._answers(batch))

    @override
    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[WrittenAnswer]:
        return self._answers(batch)

    def _answers(self, prompts: PromptBatch) -> list[WrittenAnswer]:
        """Answer prompts with the likeliest tokens, those that leave room for an answer."""
        room = math.inf if self.max_positions is None else self.max_positions
        short = prompts.prompt_mask.sum(1) + self.sampling.max_new_tokens <= room
        prompts = prompts.select(short.nonzero()[:, 0].cpu()).to(self.device)
        if len(prompts) == 0:
            return []
        assert self.network is not None
        with torch.no_grad(), self.trainer.precision_plugin.forward_context():
            rollout = NativeEngine().generate(
                self.network,
                prompts,
                sampling=self.sampling,
                stops=StopRules.build(self.tokenizer, self.network, self.sampling),
                policy_version=self.steps_done,
                greedy=True,
            )
        found = completions_of(rollout, self.tokenizer)
        return [
            WrittenAnswer(
                number=int(prompts.indices[row]),
                prompt=found.prompts[row],
                response=found.responses[row],
                demonstrated=str(prompts.records[row].metadata.get("demonstrated", "")),
                num_tokens=len(found.response_ids[row]),
                truncated=found.truncated[row],
            )
            for row in range(len(prompts))
        ]

    # ------------------------------------------------------------------ what is left behind

    @property
    def export_source(self) -> str:
        """Path of the model that the training began with."""
        return self.policy.path

    @property
    def export_network(self) -> nn.Module:
        """What is written."""
        assert self.network is not None
        return self.network

    def export_settings(self) -> dict[str, Any]:
        """Return what the model's card says of the training."""
        return {"chat_template": self.chat_template, "lora": self.policy.lora is not None}

    @override
    def export(self, folder: Path) -> None:
        assert self.network is not None
        save_model(self.network, self.tokenizer, folder)

    @override
    def models(self) -> dict[str, Any]:
        return {
            "policy": asdict(self.policy),
            "sampling": asdict(self.sampling),
            "chat_template": self.chat_template,
        }
