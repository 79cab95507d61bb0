"""From labelled film reviews to a model that goes on with praise: SFT, reward model, PPO, judge.

    python experiments/recipes/reviews.py                # three seeds of PPO
    python experiments/recipes/reviews.py --seed 0       # one of them
    python experiments/recipes/reviews.py --small        # all steps in minutes, in another folder

Steps: data -> sft -> reward -> check-reward -> ppo of each seed -> export of each seed -> report.
Those that are done are not repeated, and a run that was cut off goes on from its last checkpoint:
call the script again. The report is ``report.md`` and ``report.json`` in the folder.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.recipes.common import (
    CONFIGS,
    Result,
    Steps,
    command,
    digest,
    fit,
    last_values,
    markdown_table,
    parser_of,
    shown,
)
from experiments.recipes.review_data import Sizes, make_data
from ppo_lightning.io import read_json, read_jsonl, read_text, write_json_atomic, write_text_atomic

OUT = Path("runs/recipes/reviews")

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

PROMPTS_SHOWN = 8


class Recipe:
    """The steps, in the order of their methods.

    Args:
        folder: Of everything that is written.
        small: Minutes instead of an hour.
    """

    def __init__(self, folder: Path, *, small: bool) -> None:
        self.folder = folder
        self.sizes = SMALL_SIZES if small else Sizes()
        self.options = SMALL if small else FULL
        self.steps = Steps(folder)

    def data(self, name: str) -> Path:
        """Return a file of the data."""
        return self.folder / "data" / f"{name}.jsonl"

    def make_data(self) -> Result:
        """Write the texts of all steps."""
        sizes = asdict(self.sizes)
        return self.steps.take(
            "data", lambda: make_data(self.folder / "data", self.sizes), of={"sizes": sizes}
        )

    def sft(self) -> Result:
        """Fine-tune the language model on openings and what follows them."""

        def make() -> Result:
            before = self._perplexity_before()
            fit(self._config("sft"), self.folder / "sft", self._options("sft", "demonstrations"))
            return last_values(self.folder / "sft", "val/") | {"before": before}

        return self.steps.take("sft", make, of=self._ingredients("sft", "demonstrations"))

    def _perplexity_before(self) -> float:
        """Measure the model that SFT begins with on the same texts."""
        logger, folder = "--trainer.logger", self.folder / "sft-before"
        command(
            *("validate", "--config", self._config("sft"), *self._options("sft", "demonstrations")),
            *(logger, "lightning.pytorch.loggers.CSVLogger", f"{logger}.save_dir", self.folder),
            *(f"{logger}.name", "", f"{logger}.version", folder.name),
        )
        (row,) = csv.DictReader(io.StringIO(read_text(folder / "metrics.csv")))
        return float(row["val/perplexity"])

    def reward(self) -> Result:
        """Train the reward model on pairs of its own half."""

        def make() -> Result:
            fit(self._config("reward"), self.folder / "reward", self._options("reward", "pairs"))
            return last_values(self.folder / "reward", "val/")

        return self.steps.take("reward", make, of=self._ingredients("reward", "pairs"))

    def check_reward(self) -> Result:
        """Measure the reward model where PPO meets it: as the reward that it will be."""
        return self.steps.take("check-reward", self._check_reward, of={"reward": self.reward()})

    def _check_reward(self) -> Result:
        found = self.folder / "check_reward.json"
        command(
            *("check-reward", self.folder / "reward", "--output", found),
            *("--pairs", self.data("val_pairs"), *self.options["check-reward"]),
        )
        (pairs,) = read_json(found)["kinds"]
        return dict(pairs)

    def ppo(self, seed: int) -> Result:
        """Train the policy; the judge scores its answers and SFT's to the held-out prompts."""
        folder = self.folder / f"ppo-{seed}"

        def make() -> Result:
            fit(self._config("ppo"), folder, self._ppo_options(), seed=seed)
            summary = read_json(folder / "summary.json")
            return {key: summary[key] for key in ("changes", "texts", "seconds", "memory_gib")}

        of = self._ingredients("ppo", "prompts") | {
            "judge": digest(self.data("judge")),
            "sft": self.sft(),
            "reward": self.reward(),
        }
        return self.steps.take(f"ppo-{seed}", make, of=of)

    def export(self, seed: int) -> Result:
        """Let transformers alone load what PPO has left, and go on with held-out openings."""
        folder = self.folder / f"ppo-{seed}" / "model"
        prompts = [record["prompt"] for _, record in read_jsonl(self.data("val_prompts"))][:3]
        return self.steps.take(
            f"export-{seed}", lambda: continuations(folder, prompts), of={"ppo": self.ppo(seed)}
        )

    def report(self, seeds: Sequence[int]) -> str:
        """Put all figures together; returns Markdown."""
        result = {
            "data": self.make_data(),
            "sft": self.sft(),
            "reward": self.check_reward(),
            "ppo": {seed: self.ppo(seed) for seed in seeds},
            "seconds": {
                name: self.steps.seconds(name)
                for name in ("sft", "reward", *(f"ppo-{seed}" for seed in seeds))
            },
        }
        text = report_of(result)
        write_json_atomic(self.folder / "report.json", result)
        write_text_atomic(self.folder / "report.md", text)
        return text

    def _config(self, step: str) -> Path:
        return CONFIGS / "reviews" / f"{step}.yaml"

    def _ingredients(self, step: str, file: str) -> dict[str, Any]:
        data = digest(self.data(file), self.data(f"val_{file}"))
        config = digest(self._config(step))
        return {"config": config, "data": data, "options": self.options[step]}

    def _options(self, step: str, file: str) -> list[str]:
        return [
            *(f"--data.{file}", str(self.data(file))),
            *(f"--data.val_{file}", str(self.data(f"val_{file}"))),
            *self.options[step],
        ]

    def _ppo_options(self) -> list[str]:
        return [
            *("--model.policy.path", str(self.folder / "sft")),
            *("--model.rewards[praise].component.path", str(self.folder / "reward")),
            *("--model.gold.init_args.data.init_args.path", str(self.data("judge"))),
            *self._options("ppo", "prompts"),
        ]


def continuations(folder: Path, prompts: Sequence[str]) -> Result:
    """Go on with texts, by nothing but transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = {}
    for prompt in prompts:
        encoded = tokenizer(prompt, return_tensors="pt")
        tokens = model.generate(**encoded, do_sample=False, max_new_tokens=24)
        found[prompt] = tokenizer.decode(tokens[0], skip_special_tokens=True)
    return {"model": str(folder), "greedy": found}


def report_of(result: Mapping[str, Any]) -> str:
    """Lay the figures out as Markdown: reward model, PPO of each seed, texts side by side."""
    pairs, sft = result["reward"], result["sft"]
    lines = [
        f"SFT: held-out perplexity {sft['before']:.1f} → {sft['val/perplexity']:.1f}, "
        f"{result['seconds']['sft']:.0f} s.",
        f"Reward model: {pairs['share']:.3f} of {pairs['pairs']} held-out pairs told apart "
        f"({pairs['low']:.3f} to {pairs['high']:.3f}), {result['seconds']['reward']:.0f} s.",
        "Before → after (95 % interval of the gain, paired over held-out prompts):",
        markdown_table(
            ("seed", "reward", "judge", "KL, nats", "length, tokens", "wall, s"),
            [seed_row(seed, run) for seed, run in result["ppo"].items()],
        ),
    ]
    for seed, run in result["ppo"].items():
        rows = [
            (row["prompt"], row["reference"], row["policy"]) for row in run["texts"][:PROMPTS_SHOWN]
        ]
        table = markdown_table(("opening", "SFT goes on", "PPO goes on"), rows)
        lines += [f"Seed {seed}, the first held-out openings:", table]
    return "\n\n".join(lines) + "\n"


def seed_row(seed: int, run: Mapping[str, Any]) -> list[str]:
    """Return the cells of one seed's row."""
    names = ("proxy reward", "gold reward", "KL to reference, nats", "length, tokens")
    return [str(seed), *(shown(run["changes"][name]) for name in names), f"{run['seconds']:.0f}"]


def main() -> None:
    """Take all steps that are missing, and print the report."""
    given = parser_of(__doc__, out=OUT).parse_args()
    small = given.small
    seeds = given.seed or ([0] if small else [0, 1, 2])
    recipe = Recipe(given.out or (OUT.with_name("reviews-small") if small else OUT), small=small)
    recipe.make_data()
    recipe.sft()
    recipe.reward()
    recipe.check_reward()
    for seed in seeds:
        recipe.ppo(seed)
        recipe.export(seed)
    print(f"\n{recipe.report(seeds)}")


if __name__ == "__main__":
    main()
