"""What the project knows of each illness: signs in words, causes, remedies, and what to turn.

The page on troubleshooting is made from here, and so are the words of every diagnosis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppo_lightning.diagnostics.rules.learning import (
    CATCHING_UP,
    DIVERGING,
    HELD_BACK,
    TOO_SLOW,
)
from ppo_lightning.diagnostics.rules.numbers import SPREADING
from ppo_lightning.metrics import IterationStats


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One thing to try in the config.

    Args:
        key: The setting, as it stands in a config below ``model.init_args``, or with all of its
            path where that begins with ``data.`` or ``trainer.``; or a class of this project, with
            an argument of it or without; or a command.
        factor: What its value is multiplied by; or
        value: what it is set to; with ``field`` what it is lowered to.
        why: What it does.
        from_zero: What to begin with where the value is 0, and a factor would do nothing.
        field: Field of ``IterationStats`` that holds the value in force, for figures.
    """

    key: str
    why: str
    factor: float | None = None
    value: float | str | None = None
    from_zero: float | None = None
    field: str | None = None

    def text(self, now: IterationStats | None = None) -> str:
        """Say what to do, with the value in force if it is known."""
        current = None if now is None or self.field is None else getattr(now, self.field)
        what = f"`{self.key}`"
        if current == 0 and self.from_zero is not None:
            return f"{what} 0 → {self.from_zero:g}: {self.why}"
        if current and isinstance(self.value, float) and current <= self.value:
            return f"{what} is {_number(current)} already: look at the others"
        if self.value is not None:
            what += (
                f" {_number(current)} → {_number(self.value)}"
                if current
                else (f": {_number(self.value)}")
            )
        elif self.factor is not None and current:
            what += f" {_number(current)} → {_number(current * self.factor)}"
        elif self.factor is not None:
            what += f" × {self.factor:g}" if self.factor >= 1 else f" ÷ {1 / self.factor:g}"
        return f"{what}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How the doctor turns a dial of ``module.controls`` when it may act.

    Args:
        dial: Its name.
        factor: On what the dial is at; or
        value: what it is set to; or
        by_spread: whether it is multiplied by the spread of the scores that training sees, so that
            it means what it means for scores of spread 1.
        from_zero: What a dial that is at 0 is set to, where a factor would do nothing; of
            ``kl_coef`` in spreads of the scores per nat.
        iterations: How long one dose holds; None leaves it until the illness is over.
        form: The form of the illness that it is for; any if empty.
    """

    dial: str
    factor: float | None = None
    value: float | None = None
    by_spread: bool = False
    from_zero: float | None = None
    iterations: int | None = None
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One illness.

    Args:
        title: Its name in words.
        signs: How it shows.
        causes: The likeliest first.
        remedies: The first to try first.
        turns: What the doctor does itself under ``policy: act``; none where only a person can
            help.
        source: Where this knowledge is from.
    """

    title: str
    signs: str
    causes: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    turns: tuple[Turn, ...] = ()
    source: str


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


_MEASURED = "measured on small labelled runs"
_HUANG = "Huang et al. 2024, arXiv:2403.17031"
_GAO = "Gao et al. 2022, arXiv:2210.10760"
_ZIEGLER = "Ziegler et al. 2019, arXiv:1909.08593"
_ZHENG = "Zheng et al. 2023, arXiv:2307.04964"
_ANDRYCHOWICZ = "Andrychowicz et al. 2020, arXiv:2006.05990"
_SINGHAL = "Singhal et al. 2023, arXiv:2310.03716"
_OUYANG = "Ouyang et al. 2022, arXiv:2203.02155"
_SCHULMAN = "Schulman et al. 2017, arXiv:1707.06347"

_LOWER_RATE = Remedy(
    key="actor.lr", factor=0.1, field="lr_actor", why="the step is too large for this model"
)
_RAISE_BETA = Remedy(
    key="kl.coef",
    factor=4.0,
    from_zero=0.05,
    field="kl_coef",
    why="a stronger pull towards the reference",
)
_NARROW = Remedy(
    key="ppo.clip_range", factor=0.5, field="clip_range", why="less movement in one update"
)
_STOP_SOONER = Remedy(
    key="ppo.target_kl", value=0.01, why="ends an update that goes too far; 0.02 is the preset"
)
_ROLLBACK = Remedy(
    key="CheckpointRollback", why="goes back to the last healthy state, with lower rates"
)
_READ = Remedy(key="SampleTexts", why="read the best-scored answers before anything else")

HANDBOOK: Mapping[str, Card] = {
    "update_too_large": Card(
        title="Updates too large",
        signs="KL between old and new policy and the clip fraction leap, often in the first "
        "iteration; the score falls to an extreme. Afterwards all is calm, because the policy is "
        "nearly deterministic.",
        causes=(
            "the actor's learning rate is too high",
            "advantages of ±100, from an untrained critic or an outlier",
            "no clip of the gradient norm",
            "too few minibatches' worth of data for the rate",
        ),
        remedies=(
            _LOWER_RATE,
            _STOP_SOONER,
            Remedy(key="actor.max_grad_norm", value=0.5, why="bounds a step; 1 is the preset"),
            _NARROW,
            _ROLLBACK,
        ),
        turns=(
            Turn(dial="actor_lr_factor", factor=0.1),
            Turn(dial="critic_lr_factor", factor=0.5),
        ),
        source=f"{_SCHULMAN}; {_HUANG}; {_MEASURED}",
    ),
    "policy_collapse": Card(
        title="Collapse of the policy",
        signs="The score falls at once far below its level; answers turn to gibberish or to one "
        "repeated token; entropy is near 0.",
        causes=(
            "an update that went too far",
            "absurd scores for odd answers",
            "β too small, or 0",
        ),
        remedies=(
            _ROLLBACK,
            _LOWER_RATE,
            _RAISE_BETA,
            Remedy(key="reward_processing.clip", value=5.0, why="no score is absurd any more"),
        ),
        turns=(
            Turn(dial="actor_lr_factor", factor=0.1),
            Turn(dial="kl_coef", factor=2.0, from_zero=0.05),
        ),
        source=f"{_ZHENG}; {_MEASURED}",
    ),
    "reward_hacking": Card(
        title="Reward hacking",
        signs="The score climbs beyond sense while an independent judge disagrees; KL rises fast, "
        "entropy falls, texts grow longer, templated or repetitive.",
        causes=("a hole in the reward model", "β too small: nothing keeps the policy near it"),
        remedies=(
            _READ,
            _RAISE_BETA,
            Remedy(
                key="rewards", why="add a term or a constraint on repetition, length or toxicity"
            ),
            Remedy(key="GoldEarlyStopping", why="stops on the independent score"),
            Remedy(key="MaxKL", why="bounds how far the policy may go"),
            Remedy(key="export-pairs", why="hacked answers as preference data for the next reward"),
        ),
        turns=(Turn(dial="kl_coef", factor=4.0, from_zero=0.1),),
        source=f"{_GAO}; {_MEASURED}",
    ),
    "over_optimisation": Card(
        title="Over-optimisation",
        signs="The score is still high or rising, the gold score fell from its best; the reward "
        "gained for a nat shrinks.",
        causes=("a proxy pushed too far (Goodhart)", "the run is longer than its reward is good"),
        remedies=(
            Remedy(key="GoldEarlyStopping", why="stops there, with the best checkpoint by gold"),
            Remedy(key="kl.max_kl_ref_per_token", value=0.1, why="a hard bound in nats a token"),
            Remedy(key="RewardPerKL", why="raises β as a nat buys less"),
            Remedy(key="PullBack", why="moves the weights back towards the reference"),
        ),
        turns=(Turn(dial="kl_coef", factor=2.0, from_zero=0.1),),
        source=_GAO,
    ),
    "kl_runaway": Card(
        title="KL runs away",
        signs="KL to the reference grows steadily without a plateau, and the penalty is small "
        "beside the scores.",
        causes=("β too small", "ε or the rate too large", "too many passes", "not the SFT model"),
        remedies=(
            Remedy(key="AdaptiveKL", why="steers β so that KL settles at a target of 3 to 10 nats"),
            _RAISE_BETA,
            _NARROW,
            Remedy(key="actor.lr", factor=0.5, field="lr_actor", why="slower drift"),
        ),
        turns=(
            Turn(dial="kl_coef", factor=4.0, from_zero=0.1),
            Turn(dial="actor_lr_factor", factor=0.5),
            Turn(dial="clip_range", factor=0.5),
        ),
        source=f"{_ZIEGLER}; {_MEASURED}",
    ),
    "no_reward_signal": Card(
        title="No reward signal",
        signs="KL rises and the score does not: far less is gained than the same KL could buy; or "
        "every answer has the same score.",
        causes=(
            "the reward cannot tell answers apart: untrained, wrong template or tokenizer",
            "the critic is wrong or noisy",
            "prompts too hard or too easy",
            "noise walks: the rate is too high for the signal",
        ),
        remedies=(
            Remedy(key="check-reward", why="scores good against bad answers before any training"),
            Remedy(key="ValueWarmup", why="a critic first, so that advantages are no noise"),
            Remedy(key="rewards", why="sharpen or normalise the reward; look at its spread"),
            Remedy(key="data.init_args.prompts", why="others; look at `rollout/flat_prompt_share`"),
        ),
        turns=(Turn(dial="actor_lr_factor", factor=0.3),),
        source=_MEASURED,
    ),
    "stalled": Card(
        title="Stalled",
        signs="Score and KL stand still. Either updates hardly move the policy, or β takes back "
        "what they gain.",
        causes=("β too strong", "the rate too low", "ε too tight", "scores clipped away"),
        remedies=(
            Remedy(key="kl.coef", factor=0.25, field="kl_coef", why="the penalty outweighs scores"),
            Remedy(
                key="actor.lr",
                factor=5.0,
                field="lr_actor",
                why="where the clip fraction is about 0",
            ),
            Remedy(key="check-reward", why="is there anything to learn?"),
            Remedy(
                key="data.init_args.buffer.num_prompts", factor=2.0, why="less noise in each update"
            ),
        ),
        turns=(
            Turn(dial="kl_coef", factor=0.25, form=HELD_BACK),
            Turn(dial="actor_lr_factor", factor=4.0, form=TOO_SLOW),
        ),
        source=_MEASURED,
    ),
    "critic_failure": Card(
        title="The critic fails",
        signs="Explained variance is below 0, or still about 0 after several iterations; the value "
        "loss is high or jumps; advantages spread widely.",
        causes=(
            "the critic's rate is too high or too low",
            "a bad start of the value head",
            "too few steps",
            "a shared trunk in conflict",
            "a reward that cannot be predicted (look at the other diagnoses first)",
        ),
        remedies=(
            Remedy(key="critic.lr", factor=0.5, field="lr_critic", why="where the loss jumps"),
            Remedy(key="ValueWarmup.num_iterations", value=10.0, why="the critic learns first"),
            Remedy(
                key="ppo.value_clip_range", value=0.1, why="bounds an update; 0.2 is the preset"
            ),
            Remedy(key="critic_model", why="start it from the SFT or the reward model"),
        ),
        turns=(
            Turn(dial="critic_lr_factor", factor=0.5, form=DIVERGING),
            Turn(dial="critic_lr_factor", factor=2.0, form=CATCHING_UP),
            Turn(dial="train_actor", value=0.0, iterations=4, form=CATCHING_UP),
            Turn(dial="train_actor", value=0.0, iterations=4, form=DIVERGING),
        ),
        source=f"{_ANDRYCHOWICZ}; {_HUANG}; {_MEASURED}",
    ),
    "entropy_collapse": Card(
        title="Entropy collapses",
        signs="Entropy is below half of the SFT model's, or falls at once; answers all begin "
        "alike. With a rising score it is hacking, with a flat one a local optimum. A place in the "
        "answers, or a group of prompts, that lost half of its entropy alone is watched.",
        causes=("over-optimisation", "ε or the rate too large", "narrow prompts", "temperature"),
        remedies=(
            Remedy(key="EntropyTarget", why="steers the entropy bonus so that it holds"),
            Remedy(key="ppo.ent_coef", value=0.01, why="a bonus for entropy"),
            _LOWER_RATE,
            _RAISE_BETA,
            Remedy(
                key="sampling.temperature",
                factor=1.1,
                field="temperature",
                why="answers that are less alike",
            ),
        ),
        turns=(
            Turn(dial="ent_coef", factor=2.0, from_zero=0.1),
            Turn(dial="kl_coef", factor=2.0, from_zero=0.05),
            Turn(dial="temperature", factor=1.1),
        ),
        source=_MEASURED,
    ),
    "length_exploitation": Card(
        title="Length is exploited",
        signs="Answers grow beyond 1.35 times the start, and score and length went together from "
        "the first iteration.",
        causes=("a reward model that takes length for quality",),
        remedies=(
            Remedy(key="rewards", why="a constraint or a penalty on length"),
            Remedy(key="RewardModule", why="train the reward model on pairs of equal length"),
            _RAISE_BETA,
        ),
        turns=(Turn(dial="kl_coef", factor=4.0, from_zero=0.1),),
        source=f"{_SINGHAL}; {_MEASURED}",
    ),
    "overfit_buffer": Card(
        title="The buffer is overfitted",
        signs="Many passes over one buffer: KL between old and new policy above 0.05, more than "
        "0.3 of the tokens outside the band.",
        causes=("too many update epochs", "a buffer too small for them"),
        remedies=(
            Remedy(key="ppo.num_update_epochs", value=4.0, field="epochs_done", why="fewer passes"),
            _STOP_SOONER,
            Remedy(
                key="data.init_args.buffer.num_prompts", factor=4.0, why="more data for each update"
            ),
        ),
        turns=(
            Turn(dial="num_update_epochs", factor=0.5),
            Turn(dial="actor_lr_factor", factor=0.5),
        ),
        source=f"{_HUANG}; {_MEASURED}",
    ),
    "oscillation": Card(
        title="Oscillation",
        signs="The score swings back and forth from iteration to iteration.",
        causes=("the rate is too high", "a small buffer", "momentum from a former buffer"),
        remedies=(
            Remedy(key="actor.lr", factor=0.3, field="lr_actor", why="smaller steps"),
            Remedy(
                key="data.init_args.buffer.num_prompts", factor=2.0, why="less noise in each update"
            ),
            Remedy(key="ppo.num_update_epochs", value=2.0, field="epochs_done", why="fewer passes"),
        ),
        turns=(Turn(dial="actor_lr_factor", factor=0.3),),
        source=_MEASURED,
    ),
    "nonfinite_update": Card(
        title="Numbers that are not finite",
        signs="NaN or infinity in a loss, gradient or log-probability; steps are skipped.",
        causes=("overflow of the ratio", "fp16", "a broken score", "a weight that is not finite"),
        remedies=(
            Remedy(key="trainer.precision", value="bf16-mixed", why="or 32-true; never fp16"),
            _ROLLBACK,
            Remedy(key="reward_processing.on_nonfinite", value="drop", why="and count the sample"),
            _LOWER_RATE,
        ),
        turns=(Turn(dial="actor_lr_factor", factor=0.5, form=SPREADING),),
        source=_MEASURED,
    ),
    "reward_nonfinite": Card(
        title="Scores that are not finite",
        signs="Responses are dropped because their score is NaN or infinite.",
        causes=("a reward model in fp16", "a division by zero in a rule", "empty answers"),
        remedies=(
            Remedy(key="reward_processing.on_nonfinite", value="drop", why="and count the sample"),
            Remedy(key="rewards", why="find the texts: they are in the buffer's dump"),
        ),
        source=_MEASURED,
    ),
    "reward_scale": Card(
        title="Scores of the wrong scale",
        signs="The spread of the scores is far above 1 and the value loss enormous, while the "
        "actor looks normal, because whitening hides it.",
        causes=("a reward model that was never normalised", "a sum over tokens or terms"),
        remedies=(
            Remedy(
                key="reward_processing.normalize", value="running", why="divides by their spread"
            ),
            Remedy(key="reward_processing.clip", value=5.0, why="bounds what is left"),
        ),
        turns=(Turn(dial="kl_coef", by_spread=True),),
        source=f"{_ZHENG}; {_MEASURED}",
    ),
    "reward_outlier": Card(
        title="An outlier among the scores",
        signs="One score is out of all proportion: a skew beyond 8, a leap of the value loss.",
        causes=("a broken score", "a text that the reward model was never meant for"),
        remedies=(
            Remedy(key="rewards", why="find the text: it is the extreme of the buffer"),
            Remedy(key="reward_processing.clip", value=5.0, why="bounds it; 10 is the preset"),
        ),
        source=_MEASURED,
    ),
    "stale_rollouts": Card(
        title="Stale rollouts",
        signs="Responses are older than the weights: a lag of several updates, a negative mean KL "
        "to the reference.",
        causes=("the sampler's weights are not renewed", "rollouts too far ahead"),
        remedies=(
            Remedy(key="staleness.on_stale", value="correct", why="truncated importance weights"),
            Remedy(key="staleness.max_lag", value=1.0, why="drops what is older"),
        ),
        source=_MEASURED,
    ),
    "sampling_mismatch": Card(
        title="Sampler and trainer disagree",
        signs="The same weights give the sampled tokens another log-probability in the trainer's "
        "forward pass; the ratio differs from 1 before any step; KL to the reference is not 0 "
        "before any update.",
        causes=(
            "sampling and scoring at different temperature, or after top-k or top-p",
            "dropout in one of them",
            "low precision of the sampler",
            "missing position ids under left padding",
            "a reference that is not the model which the policy began as",
        ),
        remedies=(
            Remedy(key="sampling.top_p", value=1.0, why="sample what is scored"),
            Remedy(key="sampling.top_k", value=0.0, why="the same"),
            Remedy(key="staleness.correct_all", value="true", why="truncated importance weights"),
            Remedy(key="engine", why="the sampler's dtype as the trainer's"),
            Remedy(key="reference.path", value="null", why="takes what the policy begins as"),
        ),
        source=_MEASURED,
    ),
    "rank_trouble": Card(
        title="Trouble between ranks",
        signs="A rank spends its time waiting for the others.",
        causes=("uneven work", "a slow device or disk", "a decision taken locally"),
        remedies=(
            Remedy(key="trainer.devices", why="devices of one kind"),
            Remedy(key="Watchdog", why="names rank and stage of a stall"),
        ),
        source=_MEASURED,
    ),
}
