"""The row of steps that both recipes take: data, SFT, reward model, judge, PPO, export.

``Recipe`` takes them and puts the figures together; ``reviews.py`` and ``chat.py`` say what theirs
are made of.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from torch import Tensor

from experiments.recipes.common import (
    CONFIGS,
    Result,
    Steps,
    digest,
    fit,
    last_values,
    markdown_table,
    parser_of,
    shown,
    validate,
)
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.io import read_json, write_json_atomic, write_text_atomic

OUT = Path("runs/recipes")

CHANGES = ("proxy reward", "gold reward", "KL to reference, nats", "length, tokens")
"""What the report shows of each seed's PPO."""

Text = TypeVar("Text")


class Recipe(ABC):
    """The steps, in the order of their methods; those that differ are abstract.

    Args:
        folder: Of everything that is written.
        sizes: How many texts of each kind, a dataclass.
        options: More of the command line, by step.
    """

    name: ClassVar[str]
    """Of the folder of its configs, and of what it writes."""
    term: ClassVar[str]
    """Name of the reward in PPO's config."""
    timed: ClassVar[tuple[str, ...]] = ("sft", "reward")
    """Steps before PPO with a wall time in the report."""
    examples: ClassVar[tuple[Any, ...]]
    """Written for the recipe, so that what the models say to them may be shown anywhere."""
    heads: ClassVar[tuple[str, str, str]]
    """Of the table that shows it: the example, what SFT and what PPO say."""

    def __init__(self, folder: Path, *, sizes: Any, options: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.sizes = sizes
        self.options = options
        self.steps = Steps(folder)

    def data(self, name: str) -> Path:
        """Return a file of the data."""
        return self.folder / "data" / f"{name}.jsonl"

    # ------------------------------------------------------------------ steps

    def make_data(self) -> Result:
        """Write the texts of all steps."""
        return self.steps.take("data", self._make_data, of={"sizes": asdict(self.sizes)})

    @abstractmethod
    def _make_data(self) -> Result: ...

    def sft(self) -> Result:
        """Fine-tune the language model; measure it before and after."""

        def make() -> Result:
            options = self._options("sft", "demonstrations")
            before = validate(self._config("sft"), self.folder / "sft-before", options)
            fit(self._config("sft"), self.folder / "sft", options)
            return last_values(self.folder / "sft", "val/") | {"before": before["val/perplexity"]}

        return self.steps.take("sft", make, of=self._ingredients("sft", "demonstrations"))

    def reward(self) -> Result:
        """Train the reward model on texts of its own."""

        def make() -> Result:
            fit(self._config("reward"), self.folder / "reward", self._options("reward", "pairs"))
            return last_values(self.folder / "reward", "val/")

        return self.steps.take("reward", make, of=self._ingredients("reward", "pairs"))

    def judge(self) -> Any:
        """Return what the judge is made of: texts, where it is no step of its own."""
        return digest(self.data("judge"))

    def check_reward(self) -> Result:
        """Measure the reward model where PPO meets it: as the reward that it will be."""
        return self.steps.take("check-reward", self._check_reward, of={"reward": self.reward()})

    @abstractmethod
    def _check_reward(self) -> Result: ...

    def ppo(self, seed: int) -> Result:
        """Train the policy; the judge scores its texts and SFT's to the held-out prompts."""
        folder = self.folder / f"ppo-{seed}"

        def make() -> Result:
            fit(self._config("ppo"), folder, self._ppo_options(), seed=seed)
            summary = read_json(folder / "summary.json")
            return {key: summary[key] for key in ("changes", "texts", "seconds", "memory_gib")}

        of = self._ingredients("ppo", "prompts") | {
            "sft": self.sft(),
            "reward": self.reward(),
            "judge": self.judge(),
        }
        return self.steps.take(f"ppo-{seed}", make, of=of)

    def export(self, seed: int) -> Result:
        """Let transformers alone load what SFT and PPO have left, and go on with the examples."""

        def make() -> Result:
            folders = {"sft": self.folder / "sft", "ppo": self.folder / f"ppo-{seed}"}
            return {
                name: likeliest(folder / "model", self.examples, self._encoded)
                for name, folder in folders.items()
            }

        of = {"ppo": self.ppo(seed), "examples": self.examples}
        return self.steps.take(f"export-{seed}", make, of=of)

    @abstractmethod
    def _encoded(self, tokenizer: Any, example: Any) -> Mapping[str, Tensor]: ...

    def take_all(self, seeds: Sequence[int]) -> None:
        """Take the steps in order; each asks for those before it, which are done by then."""
        for step in (self.make_data, self.sft, self.reward, self.judge, self.check_reward):
            step()
        for seed in seeds:
            self.ppo(seed)
            self.export(seed)

    # ------------------------------------------------------------------ report

    def report(self, seeds: Sequence[int]) -> str:
        """Put all figures together; returns Markdown."""
        result = self.figures(seeds)
        text = "\n\n".join([*self.report_of(result), *self._side_by_side(result)]) + "\n"
        write_json_atomic(self.folder / "report.json", result)
        write_text_atomic(self.folder / "report.md", text)
        return text

    def figures(self, seeds: Sequence[int]) -> Result:
        """Return the results of all steps."""
        timed = (*self.timed, *(f"ppo-{seed}" for seed in seeds))
        return {
            "data": self.make_data(),
            "sft": self.sft(),
            "reward": self.check_reward(),
            "ppo": {seed: self.ppo(seed) for seed in seeds},
            "examples": {seed: self.export(seed) for seed in seeds},
            "seconds": {name: self.steps.seconds(name) for name in timed},
        }

    @abstractmethod
    def report_of(self, result: Mapping[str, Any]) -> list[str]:
        """Lay the figures out as paragraphs of Markdown."""

    def _side_by_side(self, result: Mapping[str, Any]) -> Iterator[str]:
        for seed, said in result["examples"].items():
            shown_as = (e if isinstance(e, str) else " / ".join(e) for e in self.examples)
            rows = zip(shown_as, said["sft"], said["ppo"], strict=True)
            yield f"Seed {seed}, the likeliest tokens to texts that were written for this table:"
            yield markdown_table(self.heads, rows)

    # ------------------------------------------------------------------ what a step is made of

    def _config(self, step: str) -> Path:
        return CONFIGS / self.name / f"{step}.yaml"

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
            *(f"--model.rewards[{self.term}].component.path", str(self.folder / "reward")),
            *self._judge_options(),
            *self._options("ppo", "prompts"),
        ]

    @abstractmethod
    def _judge_options(self) -> tuple[str, str]: ...


def likeliest(
    folder: Path,
    texts: Iterable[Text],
    encode: Callable[[Any, Text], Mapping[str, Tensor]],
) -> list[str]:
    """Go on with texts by 24 of the likeliest tokens, with nothing but transformers.

    Args:
        folder: A model.
        texts: What to go on with.
        encode: Makes of the tokenizer and a text what the model reads.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for text in texts:
        encoded = encode(tokenizer, text)
        tokens = model.generate(**encoded, do_sample=False, max_new_tokens=24)
        said = tokens[0, encoded["input_ids"].shape[1] :]
        found.append(tokenizer.decode(said, skip_special_tokens=True))
    return found


def perplexity_line(result: Mapping[str, Any]) -> str:
    """Say what SFT has done to the perplexity of held-out texts."""
    sft, seconds = result["sft"], result["seconds"]["sft"]
    ends = f"{sft['before']:.1f} → {sft['val/perplexity']:.1f}"
    return f"SFT: held-out perplexity {ends}, {seconds:.0f} s."


def seed_row(seed: int, run: Mapping[str, Any], *more: str) -> list[str]:
    """Return the cells of one seed's row: ``CHANGES``, further ones, the wall time."""
    changes = (shown(run["changes"][name]) for name in CHANGES)
    return [str(seed), *changes, *more, f"{run['seconds']:.0f}"]


def main(recipe: Callable[[Path, bool], Recipe], *, name: str, text: str | None) -> None:
    """Take all steps that are missing, and print the report.

    Args:
        recipe: Makes the recipe of its folder, and of whether it is the small one.
        name: Of the recipe.
        text: For ``--help``.
    """
    out = OUT / name
    given = parser_of(text, out=out).parse_args()
    small = given.small
    seeds = given.seed or ([0] if small else [0, 1, 2])
    made = recipe(given.out or (out.with_name(f"{name}-small") if small else out), small)
    try:
        made.take_all(seeds)
    except (ConfigError, ModelError) as error:  # a package is missing
        sys.exit(str(error))
    print(f"\n{made.report(seeds)}")
