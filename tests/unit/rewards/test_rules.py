import pytest

from ppo_lightning.errors import RewardError
from ppo_lightning.rewards import (
    ExactAnswerReward,
    LengthPenalty,
    MissingEosPenalty,
    RegexReward,
    RepetitionPenalty,
    ResponseLength,
    TargetLengthReward,
    scores_of,
)
from tests.helpers.completions import make_completions


def test_regex_searches():
    reward = RegexReward(r"\bcat\b", reward=2.0, otherwise=-1.0)
    scores = reward(make_completions(["a cat sat", "concatenate", "", "CAT", "猫 cat 🐈"]))
    assert scores == [2.0, -1.0, -1.0, -1.0, 2.0]


def test_regex_full_match_covers_the_whole_response():
    reward = RegexReward(r"(?i)yes|no", full_match=True)
    assert reward(make_completions(["yes", " No\n", "yes!", "yesno", ""])) == [1, 1, 0, 0, 0]


def test_a_pattern_that_is_none():
    with pytest.raises(ValueError, match=r"`pattern` must be .*'\(a'.*unterminated"):
        RegexReward("(a")
    with pytest.raises(ValueError, match="`pattern` must be"):
        ExactAnswerReward(pattern="[")


def answers(responses, answer, **options):
    metadata = [{"answer": answer}] * len(responses)
    return ExactAnswerReward(**options)(make_completions(responses, metadata=metadata))


def test_exact_answer_ignores_white_space_and_case():
    assert answers(["New  York\n", "new york", "York", ""], "New York") == [1, 1, 0, 0]
    assert answers(["New York", "new york"], "New York", ignore_case=False) == [1, 0]
    assert answers(["", " "], "", reward=3.0) == [3.0, 3.0]
    assert answers(["straße", "四"], "STRASSE", otherwise=-1.0) == [1, -1]


def test_exact_answer_compares_numbers_as_numbers():
    assert answers(["1000", "1,000", "1000.0", "1e3", "999", "many", "nan"], 1000) == [
        *(1, 1, 1, 1, 0, 0, 0)
    ]
    assert answers(["1000.0"], "1000") == [0]  # text in the record is text
    assert answers(["true", "1"], True) == [1, 0]


def test_exact_answer_with_several_right_ones():
    assert answers(["4", "four", "five"], [4, "four"]) == [1, 1, 0]


def test_exact_answer_takes_the_last_match():
    responses = ["First 3, no: the answer is 4", "the answer is four", "Answer: 4 apples"]
    assert answers(responses, 4, pattern=r"\d+") == [1, 0, 1]
    assert answers(responses, 4, pattern=r"answer is (\w+)") == [1, 0, 0]


def test_exact_answer_names_a_record_without_the_field():
    completions = make_completions(["a", "b"], metadata=[{"answr": 1}, {}])
    with pytest.raises(RewardError, match="unknown key `answer` in the prompt's record") as caught:
        scores_of(ExactAnswerReward(), "exact", completions)
    assert "did you mean `answr`" in str(caught.value)
    assert (caught.value.component, caught.value.sample) == ("exact", 0)


def test_target_length_counts_sampled_tokens():
    completions = make_completions(["x"] * 4, response_ids=[[], [1], [1] * 4, [1] * 10])
    assert TargetLengthReward(4)(completions) == [-1.0, -0.75, 0.0, -1.5]
    assert TargetLengthReward(4, scale=2.0)(completions) == [-2.0, -1.5, 0.0, -3.0]


def test_repetition_penalty():
    completions = make_completions(
        ["x"] * 4, response_ids=[[], [1, 2, 3], [1, 1, 1, 1], [1, 2] * 3]
    )
    # Bigrams: none; (12)(23); 11 three times; 12 three times and 21 twice.
    expected = [0.0, 0.0, -2 / 3, -3 / 5]
    assert RepetitionPenalty(2)(completions) == pytest.approx(expected)
    # Tokens: 1 three times too often; trigrams: 121 and 212, each twice.
    assert RepetitionPenalty(1)(completions)[1:3] == [0.0, -3 / 4]
    assert RepetitionPenalty(3)(completions)[3] == -1 / 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TargetLengthReward(0), "`target_tokens`"),
        (lambda: TargetLengthReward(4, scale=0.0), "`scale`"),
        (lambda: RepetitionPenalty(0), "`n`"),
    ],
)
def test_settings_out_of_range(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (4, 0.0), (5, -0.25), (7, -0.75), (8, -1.0), (99, -1.0)]
)
def test_length_costs_nothing_then_in_proportion_then_no_more(length, expected):
    completions = make_completions(["x"], response_ids=[[1] * length])
    assert LengthPenalty(free_tokens=4, full_tokens=8)(completions) == [expected]


@pytest.mark.parametrize(("free", "full"), [(-1, 4), (4, 4), (5, 4)])
def test_a_length_penalty_checks_itself(free, full):
    with pytest.raises(ValueError, match=r"`(free|full)_tokens`"):
        LengthPenalty(free_tokens=free, full_tokens=full)


def test_missing_end_and_length_as_components():
    completions = make_completions(["", "b"], truncated=[True, False], response_ids=[[], [7, 0]])
    assert MissingEosPenalty()(completions) == [-1.0, -0.0]
    assert ResponseLength()(completions) == [0.0, 2.0]
