"""From labelled film reviews to a model that goes on with praise: SFT, reward model, PPO, judge.

    python experiments/recipes/reviews.py                # three seeds of PPO
    python experiments/recipes/reviews.py --seed 0       # one of them
    python experiments/recipes/reviews.py --small        # all steps in minutes, in another folder

Steps: data -> sft -> reward -> check-reward -> ppo of each seed -> export of each seed -> report.
Those that are done are not repeated, and a run that was cut off goes on from its last checkpoint:
call the script again. The report is ``report.md`` and ``report.json`` in the folder.
``report.md`` shows what the models make of openings that were written for it. What they make of the
held-out ones, which are people's, stays in ``ppo-<seed>/summary.md`` and in ``report.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.recipes.common import Result, command, markdown_table
from experiments.recipes.recipe import Recipe, main, perplexity_line, seed_row
from experiments.recipes.review_data import Sizes, make_data
from ppo_lightning.io import read_json

SMALL_SIZES = Sizes(
    demonstrations=160,
    pairs=480,
    val_pairs=128,
    prompts=64,
    held_out_prompts=24,
    held_out_texts=24,
)

SMALL: Mapping[str, tuple[str, ...]] = {
    "sft": (
        *("--data.batch_size", "8", "--model.actor.warmup", "2", "--model.num_texts", "1"),
        *("--trainer.log_every_n_steps", "5"),
    ),
    "reward": ("--data.batch_size", "16", "--model.group.warmup", "3"),
    "check-reward": ("--min-separation", "0.6"),
    "ppo": (
        *("--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "2"),
        *("--data.buffer.num_prompts", "24", "--model.sampling.max_new_tokens", "16"),
        *("--model.guards.advice", "off"),
    ),
}
"""Options that make each step short."""

FULL = dict.fromkeys(SMALL, ()) | {"check-reward": ("--min-separation", "0.82")}

OPENINGS = (
    "the film begins",
    "what starts as a simple story",
    "as a director, she",
    "the two leads",
    "by the time the credits roll,",
    "the music",
    "this is a movie that",
    "for the first ten minutes",
)


class Reviews(Recipe):
    """The steps with reviews; the judge is a classifier of texts that it reads in each run.

    Args:
        folder: Of everything that is written.
        small: Minutes instead of an hour.
    """

    name = "reviews"
    term = "praise"
    examples = OPENINGS
    heads = ("opening", "SFT goes on", "PPO goes on")

    def __init__(self, folder: Path, small: bool) -> None:
        super().__init__(
            folder,
            sizes=SMALL_SIZES if small else Sizes(),
            options=SMALL if small else FULL,
        )

    def _make_data(self) -> Result:
        return make_data(self.folder / "data", self.sizes)

    def _check_reward(self) -> Result:
        found = self.folder / "check_reward.json"
        command(
            *("check-reward", self.folder / "reward", "--output", found),
            *("--pairs", self.data("val_pairs"), *self.options["check-reward"]),
        )
        (pairs,) = read_json(found)["kinds"]
        return dict(pairs)

    def _judge_options(self) -> tuple[str, str]:
        return "--model.gold.init_args.data.init_args.path", str(self.data("judge"))

    def _encoded(self, tokenizer: Any, example: str) -> Any:
        return tokenizer(example, return_tensors="pt")

    def report_of(self, result: Mapping[str, Any]) -> list[str]:
        """Lay the figures out as Markdown: reward model, PPO of each seed."""
        return report_of(result)


def report_of(result: Mapping[str, Any]) -> list[str]:
    """Lay the figures out as Markdown: reward model, PPO of each seed."""
    pairs = result["reward"]
    return [
        perplexity_line(result),
        f"Reward model: {pairs['share']:.3f} of {pairs['pairs']} held-out pairs told apart "
        f"({pairs['low']:.3f} to {pairs['high']:.3f}), {result['seconds']['reward']:.0f} s.",
        "Before → after (95 % interval of the gain, paired over held-out prompts):",
        markdown_table(
            ("seed", "reward", "judge", "KL, nats", "length, tokens", "wall, s"),
            [seed_row(seed, run) for seed, run in result["ppo"].items()],
        ),
    ]


if __name__ == "__main__":
    main(Reviews, name=Reviews.name, text=__doc__)
