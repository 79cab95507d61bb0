from ppo_lightning.callbacks.comparison import (
    OPENINGS,
    changes_of,
    changes_table,
    count_of,
    pair_answers,
    texts_of,
)
from ppo_lightning.modules import Answer


def answer(writer, number=0, *, mode="sampled", **fields):
    return Answer(
        **{
            "number": number,
            "writer": writer,
            "mode": mode,
            "prompt": f"prompt {number}",
            "response": f"{writer} {number}",
            "score": 0.0,
            "kl_ref": 2.0 if writer == "policy" else None,
            "ref_logprob": -1.0,
            "entropy": 1.0,
            "num_tokens": 2,
            "truncated": False,
            "repeated_bigrams": 0.0,
            **fields,
        }
    )


def test_answers_are_paired_by_prompt_and_sampled_ones_go_first():
    answers = [
        answer("policy", 1),
        answer("reference", 1),
        answer("reference", 0),
        answer("policy", 0),
        answer("policy", 0),
        answer("policy", 0, mode="greedy"),
        answer("policy", 2),  # which the reference has not answered
    ]
    pairs = pair_answers(answers)
    assert list(pairs) == [0, 1]
    assert [[one.writer for one in part] for part in pairs[0]] == [["reference"], ["policy"] * 2]
    assert count_of(pairs) == "2 prompts x 2 sampled answers"
    greedy = [answer(writer, mode="greedy") for writer in ("policy", "reference")]
    assert count_of(pair_answers(greedy)) == "1 prompts x 1 greedy answer"
    assert pair_answers([]) == {}


def test_changes_are_means_over_prompts_of_means_over_answers():
    answers = [
        answer("reference", 0, score=0.0, num_tokens=4),
        *(answer("policy", 0, score=score, kl_ref=3.0) for score in (0.5, 1.0)),
        answer("reference", 1, score=-1.0),
        answer("policy", 1, score=-0.75, kl_ref=1.0),
    ]
    changes = changes_of(pair_answers(answers))
    proxy = changes["proxy reward"]
    assert (proxy.before, proxy.after, proxy.gain) == (-0.5, 0.0, 0.5)
    # Resampling two prompts with the gains 0.75 and 0.25 gives one of them twice, or both.
    assert (proxy.low, proxy.high) == (0.25, 0.75)
    kl = changes["KL to reference, nats"]
    assert (kl.before, kl.after) == (0.0, 2.0)
    assert changes["length, tokens"].gain == -1.0
    assert "gold reward" not in changes


def test_the_interval_is_that_of_the_paired_difference():
    # The prompts differ a lot and the gain is the same on each: nothing is uncertain.
    answers = []
    for number in range(8):
        answers.append(answer("reference", number, score=float(number), gold=0.5))
        answers.append(answer("policy", number, score=number + 0.25, gold=0.25))
    changes = changes_of(pair_answers(answers))
    assert (changes["proxy reward"].low, changes["proxy reward"].high) == (0.25, 0.25)
    assert changes["gold reward"].high == -0.25


def test_openings_are_counted_over_all_answers():
    ids = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 9), (1, 2, 3, 5), (7,)]
    answers = [answer("policy", k, response_ids=ids[k]) for k in range(4)]
    answers += [answer("reference", k, response_ids=(k,)) for k in range(4)]
    openings = changes_of(pair_answers(answers))[OPENINGS]
    assert (openings.before, openings.after, openings.low) == (1.0, 0.75, None)


def test_table_lines_up_and_says_the_interval():
    answers = [answer("reference", score=0.125), answer("policy", score=1.0)]
    lines = changes_table(changes_of(pair_answers(answers))).split("\n")
    assert len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[2].split("|")]
    assert cells[1:-1] == ["proxy reward", "0.125", "1.000", "+0.875", "+0.875 to +0.875"]
    assert lines[-1].split("|")[-2].strip() == ""  # openings have no interval


def test_texts_stand_below_their_prompt():
    row = {
        "prompt": "The soup was",
        "reference": " cold.\nAnd",
        "reference_score": -0.5,
        "policy": " good.",
        "policy_score": 0.5,
    }
    assert texts_of([row]) == (
        "The soup was\n  reference -0.50  … cold. And\n  policy    +0.50  … good."
    )
    assert texts_of([]) == ""
