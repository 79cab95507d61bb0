"""From chats of people to a model whose replies fit better: SFT, reward model, judge, PPO.

    python experiments/recipes/chat.py                # three seeds of PPO
    python experiments/recipes/chat.py --seed 0       # one of them
    python experiments/recipes/chat.py --small        # all steps in minutes, in another folder

Steps: data -> sft -> reward -> judge -> check-reward -> ppo of each seed -> export of each seed ->
report. Those that are done are not repeated, and a run that was cut off goes on from its last
checkpoint: call the script again. The report is ``report.md`` and ``report.json`` in the folder.
``report.md`` shows replies to chats that were written for it. Those to the held-out chats are
people's, and stay in ``ppo-<seed>/summary.md`` and in ``report.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.recipes.chat_data import Sizes, as_messages, make_data
from experiments.recipes.chat_judge import ReplyRanker, contents, train, words_of
from experiments.recipes.common import (
    CONFIGS,
    Result,
    Steps,
    command,
    digest,
    fit,
    last_values,
    markdown_table,
    mean_with_interval,
    parser_of,
    shown,
    validate,
    wins,
)
from ppo_lightning.errors import ConfigError, ModelError
from ppo_lightning.io import read_json, read_jsonl, write_json_atomic, write_text_atomic

OUT = Path("runs/recipes/chat")

SMALL_SIZES = Sizes(
    demonstrations=64,
    held_out_demonstrations=16,
    pairs=384,
    held_out_pairs=100,
    judge=5000,
    prompts=48,
    held_out_prompts=12,
)

SMALL: Mapping[str, tuple[str, ...]] = {
    "sft": ("--model.num_texts", "2", "--trainer.log_every_n_steps", "2"),
    "reward": (
        *("--trainer.log_every_n_steps", "4", "--data.batch_size", "16"),
        *("--model.group.lr", "2e-4", "--model.group.warmup", "3"),
    ),
    "judge": (),
    "ppo": (
        *("--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "2"),
        *("--data.buffer.num_prompts", "4", "--data.buffer.num_minibatches", "2"),
        *("--model.sampling.max_new_tokens", "12", "--model.guards.advice", "off"),
    ),
}
"""Options that make each step short."""

CHATS = (
    (
        "Hi! How was your weekend?",
        "Pretty good, I went hiking. You?",
        "I stayed home and baked bread.",
    ),
    ("What are you studying?", "Biology. And you?", "I play the cello, so music!"),
    ("Do you like dogs or cats?", "Dogs, no question.", "Really? Have you got one?"),
    ("I watched that space movie.", "Oh nice, was it any good?", "Not at all, I fell asleep."),
    ("It is so cold here today.", "Same here, it even snowed.", "I wish it was summer already."),
    ("I have an exam tomorrow.", "Oh no, in what?", "Chemistry. I have not slept at all."),
)
"""Written for this recipe, so that their texts may be shown anywhere."""


class Recipe:
    """The steps, in the order of their methods.

    Args:
        folder: Of everything that is written.
        small: Minutes instead of an hour.
    """

    def __init__(self, folder: Path, *, small: bool) -> None:
        self.folder = folder
        self.sizes = SMALL_SIZES if small else Sizes()
        self.options = SMALL if small else dict.fromkeys(SMALL, ())
        self.steps = Steps(folder)

    def data(self, name: str) -> Path:
        """Return a file of the data."""
        return self.folder / "data" / f"{name}.jsonl"

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file of the data."""
        return [record for _, record in read_jsonl(self.data(name))]

    def make_data(self) -> Result:
        """Write the texts of all steps."""
        sizes = asdict(self.sizes)
        return self.steps.take(
            "data", lambda: make_data(self.folder / "data", self.sizes), of={"sizes": sizes}
        )

    def sft(self) -> Result:
        """Fine-tune the language model on people's chats."""

        def make() -> Result:
            options = self._options("sft", "demonstrations")
            before = validate(self._config("sft"), self.folder / "sft-before", options)
            fit(self._config("sft"), self.folder / "sft", options)
            return last_values(self.folder / "sft", "val/") | {"before": before["val/perplexity"]}

        return self.steps.take("sft", make, of=self._ingredients("sft", "demonstrations"))

    def reward(self) -> Result:
        """Train the reward model on chats of its own."""

        def make() -> Result:
            fit(self._config("reward"), self.folder / "reward", self._options("reward", "pairs"))
            return last_values(self.folder / "reward", "val/")

        return self.steps.take("reward", make, of=self._ingredients("reward", "pairs"))

    def judge(self) -> Result:
        """Train the judge on other chats, and measure it on the pairs of the reward model."""

        def make() -> Result:
            pairs = [(tuple(r["context"]), r["reply"]) for r in self.records("judge")]
            ranker = train(pairs)
            ranker.save(self.folder / "judge")
            return judge_figures(ranker, self.records("val_pairs"), self.records("val_prompts"))

        of = {
            "code": digest(Path(__file__).with_name("chat_judge.py")),
            "data": digest(*map(self.data, ("judge", "val_pairs", "val_prompts"))),
        }
        return self.steps.take("judge", make, of=of)

    def check_reward(self) -> Result:
        """Measure the reward model where PPO meets it: as the reward that it will be."""
        return self.steps.take("check-reward", self._check_reward, of={"reward": self.reward()})

    def _check_reward(self) -> Result:
        found = self.folder / "check_reward.json"
        command(
            *("check-reward", self.folder / "reward", "--output", found),
            *("--pairs", self.data("val_pairs"), "--texts", self.data("val_replies")),
            *("--perturb", "off-topic", "echo", "shuffled"),
            allowed=(0, 1),  # 1: one kind is not told apart, which the report says as well
        )
        return dict(read_json(found))

    def ppo(self, seed: int) -> Result:
        """Train the policy; the judge scores its replies and SFT's to the held-out chats."""
        folder = self.folder / f"ppo-{seed}"
        of = self._ingredients("ppo", "prompts") | {
            "sft": self.sft(),
            "reward": self.reward(),
            "judge": self.judge(),
        }

        def make() -> Result:
            fit(self._config("ppo"), folder, self._ppo_options(), seed=seed)
            summary = read_json(folder / "summary.json")
            return {key: summary[key] for key in ("changes", "texts", "seconds", "memory_gib")}

        return self.steps.take(f"ppo-{seed}", make, of=of)

    def export(self, seed: int) -> Result:
        """Let transformers alone load what SFT and PPO have left, and reply to some chats."""

        def make() -> Result:
            folders = {"sft": self.folder / "sft", "ppo": self.folder / f"ppo-{seed}"}
            return {name: replies(folder / "model", CHATS) for name, folder in folders.items()}

        return self.steps.take(f"export-{seed}", make, of={"ppo": self.ppo(seed), "chats": CHATS})

    def report(self, seeds: Sequence[int]) -> str:
        """Put all figures together; returns Markdown."""
        steps = ("sft", "reward", "judge", *(f"ppo-{seed}" for seed in seeds))
        result = {
            "data": self.make_data(),
            "sft": self.sft(),
            "reward": self.check_reward(),
            "judge": self.judge(),
            "ppo": {seed: self.ppo(seed) for seed in seeds},
            "replies": {seed: self.export(seed) for seed in seeds},
            "seconds": {name: self.steps.seconds(name) for name in steps},
        }
        text = report_of(result)
        write_json_atomic(self.folder / "report.json", result)
        write_text_atomic(self.folder / "report.md", text)
        return text

    def _config(self, step: str) -> Path:
        return CONFIGS / "chat" / f"{step}.yaml"

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
            *("--model.rewards[fits].component.path", str(self.folder / "reward")),
            *("--model.gold.init_args.path", str(self.folder / "judge")),
            *self._options("ppo", "prompts"),
        ]


def judge_figures(
    ranker: ReplyRanker, pairs: Sequence[Mapping[str, Any]], prompts: Sequence[Mapping[str, Any]]
) -> Result:
    """Return how often the judge prefers the real reply of a held-out pair, and how it ranks those.

    ``people`` is what the replies that really followed the held-out prompts get: what a policy can
    be measured against.
    """
    before = [contents(pair["messages"]) for pair in pairs]
    real, wrong = (
        ranker.fits(before, [pair[side] for pair in pairs]).tolist()
        for side in ("chosen", "rejected")
    )
    asked = [contents(prompt["messages"]) for prompt in prompts]
    people = ranker.outranked(asked, [prompt["human"] for prompt in prompts])
    return {
        "accuracy": mean_with_interval(wins(real, wrong)),
        "people": mean_with_interval(people.tolist()),
    }


def replies(folder: Path, chats: Sequence[Sequence[str]]) -> list[str]:
    """Reply to chats with the likeliest tokens, by nothing but transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for chat in chats:
        encoded = tokenizer.apply_chat_template(
            as_messages(chat, last="user"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        tokens = model.generate(**encoded, do_sample=False, max_new_tokens=24)
        said = tokens[0, encoded["input_ids"].shape[1] :]
        found.append(tokenizer.decode(said, skip_special_tokens=True))
    return found


def report_of(result: Mapping[str, Any]) -> str:
    """Lay the figures out as Markdown: both rankers, PPO of each seed, texts side by side."""
    sft, judge, seconds = result["sft"], result["judge"], result["seconds"]
    lines = [
        f"SFT: held-out perplexity {sft['before']:.1f} → {sft['val/perplexity']:.1f}, "
        f"{seconds['sft']:.0f} s.",
        "Reward model, share of held-out pairs told apart (95 % interval), by what the wrong reply "
        f"is; {seconds['reward']:.0f} s:",
        markdown_table(
            ("wrong reply", "told apart", "pairs"),
            [(k["kind"], _interval(k["share"], k), k["pairs"]) for k in kinds_of(result["reward"])],
        ),
        f"Judge: {_interval(judge['accuracy']['mean'], judge['accuracy'])} of "
        f"{judge['accuracy']['count']} held-out pairs, {seconds['judge']:.0f} s. It ranks people's "
        f"own replies to the held-out chats above {judge['people']['mean']:.2f} of random ones.",
        "Before → after (95 % interval of the gain, paired over held-out chats):",
        markdown_table(
            ("seed", "reward", "judge", "KL, nats", "length, tokens", "echo", "wall, s"),
            [seed_row(seed, run) for seed, run in result["ppo"].items()],
        ),
        "`echo`: share of the words that the last turn has too, in the chats whose texts are kept.",
    ]
    for seed, said in result["replies"].items():
        rows = zip(map(" / ".join, CHATS), said["sft"], said["ppo"], strict=True)
        table = markdown_table(("chat", "SFT replies", "PPO replies"), rows)
        lines += [f"Seed {seed}, chats written for this table, the likeliest replies:", table]
    return "\n\n".join(lines) + "\n"


def kinds_of(check: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what ``check-reward`` has found, one record a kind."""
    found: Sequence[Mapping[str, Any]] = check["kinds"]
    return found


def seed_row(seed: int, run: Mapping[str, Any]) -> list[str]:
    """Return the cells of one seed's row."""
    names = ("proxy reward", "gold reward", "KL to reference, nats", "length, tokens")
    echoes = [
        fmean(echo(row["prompt"], row[writer]) for row in run["texts"])
        for writer in ("reference", "policy")
    ]
    return [
        str(seed),
        *(shown(run["changes"][name]) for name in names),
        f"{echoes[0]:.2f} → {echoes[1]:.2f}",
        f"{run['seconds']:.0f}",
    ]


def echo(turn: str, reply: str) -> float:
    """Share of a reply's words that the turn before has too; 0 for no words."""
    said, own = set(words_of(turn)), words_of(reply)
    return fmean(word in said for word in own) if own else 0.0


def _interval(share: float, ends: Mapping[str, float]) -> str:
    return f"{share:.3f} ({ends['low']:.3f} to {ends['high']:.3f})"


def main() -> None:
    """Take all steps that are missing, and print the report."""
    given = parser_of(__doc__, out=OUT).parse_args()
    small = given.small
    seeds = given.seed or ([0] if small else [0, 1, 2])
    recipe = Recipe(given.out or (OUT.with_name("chat-small") if small else OUT), small=small)
    try:
        take_all(recipe, seeds)
    except (ConfigError, ModelError) as error:  # a package is missing
        sys.exit(str(error))


def take_all(recipe: Recipe, seeds: Sequence[int]) -> None:
    """Take the steps in order; each asks for those before it, which are done by then."""
    recipe.make_data()
    recipe.sft()
    recipe.reward()
    recipe.judge()
    recipe.check_reward()
    for seed in seeds:
        recipe.ppo(seed)
        recipe.export(seed)
    print(f"\n{recipe.report(seeds)}")


if __name__ == "__main__":
    main()
