import sys

import pytest
import torch

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.rewards import LexiconReward
from ppo_lightning.rewards.lexicon import sentences
from tests.helpers.completions import make_completions

CPU = torch.device("cpu")


def score(text, *, prompts=None, **options):
    return LexiconReward(**options)(make_completions([text], prompts=prompts))[0]


def test_praise_is_positive_and_blame_negative():
    assert score("I love this wonderful day!") > 0.8
    assert score("A horrible, sad, terrible day.") < -0.8
    assert -0.6 < score("not good") < 0 < score("good")


@pytest.mark.parametrize("text", ["", "   \n", "the table", "今天天气很好", "\x00", "!!!", "1.5"])
def test_no_known_word_is_neutral(text):
    assert score(text) == 0.0
    assert score(text, per_sentence=True) == 0.0


def test_emoji_count():
    assert score("😍") > 0.3
    assert score("今天 😢") < 0


def test_whole_texts_saturate_and_sentences_do_not():
    one, many = "It is good.", "It is good. " * 12
    assert score(many) > 0.95 > score(one) + 0.3
    assert score(many, per_sentence=True) == pytest.approx(score(one))
    # One neutral sentence halves the mean.
    mixed = score("It is good. It is a table.", per_sentence=True)
    assert mixed == pytest.approx(score(one) / 2)


def test_sentences():
    text = "Pi is 3.14. Really?!  Yes…\n\nline\n很好。再见！ end"
    assert sentences(text) == ["Pi is 3.14.", "Really?!", "Yes…", "line", "很好。", "再见！", "end"]


def test_the_prompt_is_left_out_unless_asked_for():
    prompts = ["This is horrible. "]
    assert score("Good.", prompts=prompts) == score("Good.")
    both = score("Good.", prompts=prompts, include_prompt=True)
    assert both == score("This is horrible. Good.")


def test_own_words_are_added_and_win():
    assert score("a zorgy table") == 0.0
    assert score("a zorgy table", words={"Zorgy": 3.0}) > 0.5
    assert score("good", words={"good": -3.0}) < -0.5
    assert score("horrible", words={"zorgy": 3.0}) < 0


def test_own_words_can_replace_the_list(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("\ufeffzorgy\t2.5\t0.3\t[1, 2]\n\nBLEM\t-2\n", encoding="utf-8")
    options = {"lexicon_file": str(file), "extend": False}
    assert score("zorgy", **options) > 0.5
    assert score("blem", **options) < -0.4
    assert score("wonderful", **options) == 0.0
    assert score("zorgy", words={"zorgy": -1.0}, **options) < 0  # the config wins over the file


@pytest.mark.parametrize("line", ["word", "word 1.5", "word\tgood", "\t1.5", "word\tnan"])
def test_a_line_that_is_no_word_and_number(tmp_path, line):
    file = tmp_path / "words.txt"
    file.write_text(f"fine\t1\n{line}\n")
    with pytest.raises(DataError, match=r"words.txt:2: must hold a word, a tab"):
        LexiconReward(lexicon_file=str(file)).setup(CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": {"two words": 1.0}}, "single words.*'two words'"),
        ({"words": {"": 1.0}}, "single words"),
        ({"words": {"good": float("nan")}}, "'good' must have a finite number"),
        ({"extend": False}, "needs `words` or a `lexicon_file`"),
    ],
)
def test_settings_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        LexiconReward(**options)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vaderSentiment", None)
    monkeypatch.delitem(sys.modules, "vaderSentiment.vaderSentiment", raising=False)
    reward = LexiconReward()
    with pytest.raises(ConfigError, match=r"pip install 'ppo-lightning\[sentiment\]'"):
        reward.setup(CPU)


def test_two_components_have_lists_of_their_own():
    own, plain = LexiconReward(words={"good": -3.0}), LexiconReward()
    own.setup(CPU)
    plain.setup(CPU)
    assert own(make_completions(["good"]))[0] < 0 < plain(make_completions(["good"]))[0]
    plain.close()
    assert plain(make_completions(["good"]))[0] > 0
