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
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.recipes.chat_data import Sizes, as_messages, make_data
from experiments.recipes.chat_judge import ReplyRanker, contents, train, words_of
from experiments.recipes.common import (
    Result,
    command,
    digest,
    markdown_table,
    mean_with_interval,
    wins,
)
from experiments.recipes.recipe import Recipe, main, perplexity_line, seed_row
from ppo_lightning.io import read_json, read_jsonl

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


class Chat(Recipe):
    """The steps with chats; the judge is a ranker of replies, trained in a step of its own.

    Args:
        folder: Of everything that is written.
        small: Minutes instead of an hour.
    """

    name = "chat"
    term = "fits"
    timed = ("sft", "reward", "judge")
    examples = CHATS
    heads = ("chat", "SFT replies", "PPO replies")

    def __init__(self, folder: Path, small: bool) -> None:
        super().__init__(
            folder,
            sizes=SMALL_SIZES if small else Sizes(),
            options=SMALL if small else dict.fromkeys(SMALL, ()),
        )

    def records(self, name: str) -> list[dict[str, Any]]:
        """Return the records of a file of the data."""
        return [record for _, record in read_jsonl(self.data(name))]

    def _make_data(self) -> Result:
        return make_data(self.folder / "data", self.sizes)

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

    def _judge_options(self) -> tuple[str, str]:
        return "--model.gold.init_args.path", str(self.folder / "judge")

    def _check_reward(self) -> Result:
        found = self.folder / "check_reward.json"
        command(
            *("check-reward", self.folder / "reward", "--output", found),
            *("--pairs", self.data("val_pairs"), "--texts", self.data("val_replies")),
            *("--perturb", "off-topic", "echo", "shuffled"),
            allowed=(0, 1),  # 1: one kind is not told apart, which the report says as well
        )
        return dict(read_json(found))

    def _encoded(self, tokenizer: Any, example: Sequence[str]) -> Any:
        return tokenizer.apply_chat_template(
            as_messages(example, last="user"),
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )

    def figures(self, seeds: Sequence[int]) -> Result:
        """Return the results of all steps."""
        return super().figures(seeds) | {"judge": self.judge()}

    def report_of(self, result: Mapping[str, Any]) -> list[str]:
        """Lay the figures out as Markdown: both rankers, PPO of each seed."""
        return report_of(result)


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


def report_of(result: Mapping[str, Any]) -> list[str]:
    """Lay the figures out as Markdown: both rankers, PPO of each seed."""
    judge, seconds = result["judge"], result["seconds"]
    return [
        perplexity_line(result),
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
            [seed_row(seed, run, echoes(run)) for seed, run in result["ppo"].items()],
        ),
        "`echo`: share of the words that the last turn has too, in the chats whose texts are kept.",
    ]


def kinds_of(check: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return what ``check-reward`` has found, one record a kind."""
    found: Sequence[Mapping[str, Any]] = check["kinds"]
    return found


def echoes(run: Mapping[str, Any]) -> str:
    """Return how much SFT and PPO say again of the last turn, on average."""
    before, after = (
        fmean(echo(row["prompt"], row[writer]) for row in run["texts"])
        for writer in ("reference", "policy")
    )
    return f"{before:.2f} → {after:.2f}"


def echo(turn: str, reply: str) -> float:
    """Share of a reply's words that the turn before has too; 0 for no words."""
    said, own = set(words_of(turn)), words_of(reply)
    return fmean(word in said for word in own) if own else 0.0


def _interval(share: float, ends: Mapping[str, float]) -> str:
    return f"{share:.3f} ({ends['low']:.3f} to {ends['high']:.3f})"


if __name__ == "__main__":
    main(Chat, name=Chat.name, text=__doc__)
