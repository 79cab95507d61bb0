"""RewardModule: a reward model from pairs of answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from typing_extensions import override

from ppo_lightning.configs import (
    BackboneConfig,
    GroupConfig,
    OptimizerConfig,
    PreferenceConfig,
    ReadingConfig,
)
from ppo_lightning.data.preferences.pair_batches import (
    PairBatch,
    PairExample,
)
from ppo_lightning.data.preferences.pair_set import PairReader
from ppo_lightning.distributed import gather_objects
from ppo_lightning.errors import ConfigError
from ppo_lightning.metrics import RewardModelStats, StepStats
from ppo_lightning.models import (
    ScorerTokens,
    base_scorer,
    build_scorer,
    check_vocabulary,
    load_tokenizer,
    position_limit,
    save_model,
    use_template,
)
from ppo_lightning.models.card import ancestor_of, make_card, write_card
from ppo_lightning.models.pad_token import cut_at_front, use_distinct_pad
from ppo_lightning.models.reward_model import text_limit
from ppo_lightning.modules.held_out_pairs import (
    HeldOutPair,
    held_out_pairs,
    pair_record,
    pair_records,
    score_rows,
)
from ppo_lightning.modules.metrics_file import run_folder
from ppo_lightning.modules.normalised_scores import normalised_scores, score_moments
from ppo_lightning.modules.pair_steps import PairSteps
from ppo_lightning.modules.reward_report import (
    RewardReport,
    report_markdown,
    reward_report,
    write_report,
)
from ppo_lightning.modules.written import write_gathered


class RewardModule(PairSteps):
    """Train a reward model on pairs of a chosen and a rejected answer (Bradley-Terry).

    The loss of a step is the mean over its pairs of -log σ(chosen - rejected - margin), plus the
    centring term. Texts are tokenised by the function that scores them later, and scores are read
    at the last real token by the mask, so the exported model scores as the trained one does.

    Args:
        backbone: The model that becomes a reward model, and what of it is trained.
        group: Learning rate.
        optimizer: The optimiser.
        reading: What the model is shown of a prompt and an answer.
        preference: What is learned from a pair, and from which.
        microbatch_tokens: Most tokens of one forward and backward pass, padding included; None is
            one pass a step.
        max_skipped_steps: The run ends after this many steps in a row whose loss or gradient was
            not finite.
        dropout: ``off``, or ``keep`` for what the backbone's folder says.
        normalize_scores: Whether the exported model's scores have mean 0 and deviation 1 over the
            training answers: folded into its weights. A head without a bias, under a normalisation
            without one (Llama's kind), takes the scale alone.
    """

    kind: ClassVar[str] = "reward"
    stats_class: ClassVar[type[StepStats]] = RewardModelStats
    weights_setting: ClassVar[str] = "`backbone.dtype`"

    def __init__(
        self,
        backbone: BackboneConfig,
        *,
        group: GroupConfig = GroupConfig(lr=1e-5),  # noqa: B008 - frozen, as are those below
        optimizer: OptimizerConfig = OptimizerConfig(eps=1e-8),  # noqa: B008
        reading: ReadingConfig = ReadingConfig(),  # noqa: B008
        preference: PreferenceConfig = PreferenceConfig(),  # noqa: B008
        microbatch_tokens: int | None = 8192,
        max_skipped_steps: int = 5,
        dropout: Literal["off", "keep"] = "off",
        normalize_scores: bool = False,
    ) -> None:
        super().__init__(
            groups={"group": group},
            optimizer=optimizer,
            microbatch_tokens=microbatch_tokens,
            max_skipped_steps=max_skipped_steps,
            dropout=dropout,
        )
        self.backbone = backbone
        self.reading = reading
        self.preference = preference
        self.normalize_scores = normalize_scores
        self.report: RewardReport | None = None
        self._judged: list[HeldOutPair] = []

    # ------------------------------------------------------------------ what the data module asks

    @cached_property
    def tokenizer(self) -> Any:
        """The backbone's tokenizer, with the chat template in force."""
        return self._fresh_tokenizer()

    def _fresh_tokenizer(self) -> Any:
        found = load_tokenizer(
            self.backbone.path, trust_remote_code=self.backbone.trust_remote_code
        )
        if self.reading.chat_template is not None:
            use_template(found, self.reading.chat_template)
        return found

    @cached_property
    def pair_reader(self) -> PairReader:
        """What the model is shown of a pair.

        Raises:
            ConfigError: ``reading`` asks for more than the model or its tokenizer has.
        """
        asked = self.reading.plain_prompts
        has_template = bool(self.tokenizer.chat_template)
        if asked == "chat" and not has_template:
            raise ConfigError(
                "`reading.plain_prompts: chat` needs a chat template, and the tokenizer of "
                f"`{self.backbone.path}` has none. Set `text`, or `reading.chat_template`."
            )
        if self.reading.append_eos and self.tokenizer.eos_token_id is None:
            raise ConfigError(
                f"`reading.append_eos`: the tokenizer of `{self.backbone.path}` has no end token."
            )
        auto: Literal["text", "chat"] = "chat" if has_template else "text"
        tokens = ScorerTokens(
            self.tokenizer, max_length=self._max_length(), append_eos=self.reading.append_eos
        )
        return PairReader(
            tokens=tokens,
            plain_prompts=auto if asked == "auto" else asked,
            include_prompt=self.reading.include_prompt,
        )

    def _max_length(self) -> int | None:
        room = text_limit(position_limit(self.backbone), self.tokenizer)
        wanted = self.reading.max_length
        if wanted is not None and room is not None and wanted > room:
            raise ConfigError(
                f"`reading.max_length` ({wanted}) exceeds the {room} tokens that "
                f"`{self.backbone.path}` can read: lower it."
            )
        return room if wanted is None else wanted

    # ------------------------------------------------------------------ the network

    @override
    def build_network(self) -> nn.Module:
        network = build_scorer(self.backbone, keep_dropout=self.dropout == "keep")
        check_vocabulary(self.tokenizer, {"reward model": base_scorer(network)})
        return network

    # ------------------------------------------------------------------ held-out pairs

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._judged = []

    @override
    def validation_step(self, batch: PairBatch, batch_idx: int) -> None:
        with self.clock.stage(self, "validation"):
            self._judged += self._judge(batch.examples)

    def _judge(self, examples: Sequence[PairExample]) -> list[HeldOutPair]:
        """Score pairs of one rejected answer each."""
        scores = self.scores_of(score_rows(examples))
        return held_out_pairs(examples, scores, use_margin=self.preference.use_margin)

    @override
    def _held_out_stats(self) -> RewardModelStats:
        pairs = gather_objects(self._judged)
        self._judged = []
        report = self.report = reward_report(pairs, step=self.steps_done)
        squares = math.fsum((pair.chosen + pair.rejected) ** 2 for pair in pairs)
        length = report.length
        return RewardModelStats(
            step=self.steps_done,
            val_examples=float(len(pairs)),
            val_seconds=self.held_out_log.seconds(self.device),
            val_loss=report.loss + self.preference.centering_coef * squares / len(pairs),
            val_preference_loss=report.loss,
            val_accuracy=report.accuracy,
            val_accuracy_low=report.interval[0],
            val_accuracy_high=report.interval[1],
            val_calibration_error=report.calibration_error,
            val_score_mean=report.scores.mean,
            val_score_std=report.scores.std,
            val_score_gap=report.gap.mean,
            val_accuracy_chosen_longer=length.accuracy_chosen_longer,
            val_accuracy_chosen_shorter=length.accuracy_chosen_shorter,
            val_longer_wins_accuracy=length.longer_wins_accuracy,
            val_length_correlation=length.correlation,
            val_length_partial_correlation=length.partial_correlation,
        )

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._write_report("reward_report")

    @override
    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._write_report("reward_report.test")
        assert self.report is not None
        rank_zero_info(report_markdown(self.report))

    def _write_report(self, name: str) -> None:
        folder = run_folder(self.trainer)  # asked for on all ranks, which then agree
        trial_run: bool = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.trainer.sanity_checking or trial_run or not self.trainer.is_global_zero:
            return
        assert self.report is not None
        write_report(self.report, folder, name=name)

    @override
    def on_predict_epoch_start(self) -> None:
        self._judged = []

    @override
    def predict_step(self, batch: PairBatch, batch_idx: int) -> list[dict[str, Any]]:
        judged = self._judge(batch.examples)
        self._judged += judged
        return [pair_record(pair) for pair in judged]

    @override
    def on_predict_epoch_end(self) -> None:
        path = run_folder(self.trainer) / "scores.jsonl"
        write_gathered(self.trainer, path, self._judged, pair_records)
        self._judged = []
        rank_zero_info(f"Scores written to `{path}`.")

    # ------------------------------------------------------------------ what is left behind

    @override
    def models(self) -> dict[str, Any]:
        return {
            "backbone": asdict(self.backbone),
            "chat_template": self.reading.chat_template,
            "settings": self.export_settings(),
            "normalize_scores": self.normalize_scores,
        }

    @property
    def export_source(self) -> str:
        """The model that the run began with."""
        return self.backbone.path

    @property
    def export_network(self) -> nn.Module:
        """The part whose weights are written."""
        assert self.network is not None
        return self.network

    def export_settings(self) -> dict[str, Any]:
        """How the model wants to be shown its texts: defaults of ``SequenceClassifierReward``."""
        reader = self.pair_reader
        return {
            "plain_prompts": reader.plain_prompts,
            "include_prompt": reader.include_prompt,
            "append_eos": reader.tokens.append_eos,
            "max_length": reader.tokens.max_length,
        }

    @override
    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face folder of a sequence classifier; on the first rank.

        transformers' own pipeline gives the same scores for texts that the tokenizer ends alike
        (with ``append_eos``, write the end token at the end of the text; for long ones, set
        ``truncation=True``).

        Args:
            folder: New, or empty.
        """
        self.configure_model()
        assert self.network is not None
        tokenizer = self._fresh_tokenizer()
        cut_at_front(tokenizer, self.pair_reader.tokens.max_length)
        model = base_scorer(self.network)
        with normalised_scores(model, self._moments()), use_distinct_pad(model, tokenizer):
            save_model(self.network, tokenizer, folder)
        source = ancestor_of(self.backbone.path)
        settings = self.export_settings()
        write_card(folder, make_card(folder, kind=self.kind, source=source, settings=settings))

    def _moments(self) -> tuple[float, float] | None:
        """Mean and deviation that the written scores are freed of."""
        if not self.normalize_scores:
            return None
        datamodule = getattr(getattr(self, "_trainer", None), "datamodule", None)
        return score_moments(getattr(datamodule, "train_examples", ()), self.scores_of)
