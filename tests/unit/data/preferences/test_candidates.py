"""Which answers of a run are worth a person's judgement, and why."""

import pytest

from ppo_lightning.data.preferences.candidates import TOP, Candidate, choose, reasons


def usual(i, **changes):
    settings = {"prompt": f"q{i}", "policy": f"an answer number {i} of the usual kind{'!' * i}"}
    numbers = {"score": i * 0.1, "gold": i * 0.1, "kl_ref": 1 + i * 0.01}
    return Candidate(**(settings | numbers | changes))


USUAL = [usual(i) for i in range(10)]


def found_in(*odd):
    return [sorted(why) for why in reasons([*USUAL, *odd])][len(USUAL) :]


def test_usual_answers_are_not_suspicious():
    assert reasons(USUAL) == [{}] * 10


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"score": 30.0, "gold": 30.0}, "reward outlier"),
        ({"score": -30.0, "gold": -30.0}, "reward outlier"),
        ({"kl_ref": 20.0}, "high KL"),
        ({"policy": " ".join(map(str, range(200)))}, "length outlier"),
        ({"policy": "good " * 8}, "repetitive"),
        ({"policy": "好好好好好好好好好好好好"}, "repetitive"),
        ({"score": 0.95, "gold": -0.5}, "high score, low gold"),
    ],
)
def test_each_illness_has_its_reason(changes, reason):
    (why,) = found_in(usual(5, **changes))
    assert reason in why


def test_low_score_with_high_gold_and_low_kl_are_no_hacks():
    (why,) = found_in(usual(5, score=-0.05, gold=0.95))
    assert "high score, low gold" not in why
    (why,) = found_in(usual(5, kl_ref=-20.0))
    assert why == []


def test_what_was_not_measured_is_no_reason():
    bare = [Candidate(prompt=f"q{i}", policy=f"some answer {i}") for i in range(10)]
    assert reasons(bare) == [{}] * 10
    assert len(choose(bare, 4)) == 4
    assert reasons(USUAL[:3]) == [{}] * 3
    assert choose([], 5) == []


def test_half_are_the_best_and_half_suspicious_each_kind_in_turn():
    odd = [usual(20 + i, kl_ref=20.0 + i, score=0.2, gold=0.2) for i in range(3)]
    odd += [usual(30 + i, policy=f"good good good good good {i}", score=0.1) for i in range(3)]
    picked = choose([*USUAL, *odd], 6)
    names = [candidate.prompt for candidate, _ in picked]
    assert names[:3] == ["q9", "q8", "q7"]
    assert all(TOP in why for _, why in picked[:3])
    reasons_of = [{*why} - {TOP} for _, why in picked[3:]]
    assert {"high KL"} in reasons_of
    assert {"repetitive"} in reasons_of
    assert "q22" in names  # the strongest of its kind


def test_without_anything_suspicious_the_best_fill_the_number():
    picked = choose(USUAL, 4)
    assert [candidate.prompt for candidate, _ in picked] == ["q9", "q8", "q7", "q6"]
    assert all(why == [TOP] for _, why in picked)


def test_no_more_than_there_are_and_none_twice():
    odd = usual(3, prompt="odd", score=50.0, kl_ref=50.0, policy="x " * 9)
    picked = choose([*USUAL, odd], 100)
    assert len(picked) == 11
    assert len({candidate.key for candidate, _ in picked}) == 11
    (why,) = [why for candidate, why in picked if candidate.prompt == "odd"]
    assert {TOP, "reward outlier", "high KL", "repetitive"} <= {*why}


def test_a_key_tells_question_and_answer_apart():
    chat = ({"role": "user", "content": "q"},)
    keys = {
        Candidate(prompt="q", policy="a").key,
        Candidate(prompt="q", policy="b").key,
        Candidate(prompt="q", messages=chat, policy="a").key,
    }
    assert len(keys) == 3
    assert Candidate(prompt="q", policy="a", score=1.0).key in keys
