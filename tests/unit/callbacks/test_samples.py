import html
import re

import pytest

from ppo_lightning.callbacks.samples import as_markdown, side_by_side
from ppo_lightning.modules import Answer


def answer(writer, response, *, number=0, mode="greedy", **numbers):
    return Answer(
        **{
            "number": number,
            "writer": writer,
            "mode": mode,
            "prompt": f"prompt {number}",
            "response": response,
            "score": 1.0,
            "ref_logprob": -1.0,
            "entropy": 1.0,
            "num_tokens": 2,
            "truncated": False,
            "repeated_bigrams": 0.0,
            **numbers,
        }
    )


def test_answers_to_one_prompt_stand_beside_each_other():
    rows = side_by_side(
        [
            answer("policy", "b1", number=1, mode="sampled"),
            answer("policy", "b2", number=1, mode="sampled"),
            answer("reference", "r1", number=1, mode="sampled", score=0.5),
            answer("reference", "r2", number=1, mode="sampled"),
            answer("policy", "a", gold=2.0, kl_ref=0.25),
            answer("reference", "r", gold=1.0),
        ],
        iteration=3,
    )
    assert rows[0] == {
        "iteration": 3,
        "number": 0,
        "mode": "greedy",
        "prompt": "prompt 0",
        "policy": "a",
        "policy_score": 1.0,
        "policy_gold": 2.0,
        "policy_kl_ref": 0.25,
        "policy_num_tokens": 2,
        "reference": "r",
        "reference_score": 1.0,
        "reference_gold": 1.0,
        "reference_num_tokens": 2,
    }
    assert [(row["policy"], row["reference"]) for row in rows[1:]] == [("b1", "r1"), ("b2", "r2")]


def test_an_answer_without_partner_is_kept():
    [row] = side_by_side([answer("reference", "r")], iteration=None)
    assert row["reference"] == "r"
    assert "policy" not in row
    assert "iteration" not in row


HOSTILE = "`a\r\nb | **c** _d_ ~~e~~ ![x](http://h/y.png) [l](http://h) \\` <img src=x> & # $x$"


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_nothing_of_a_text_acts_where_tensorboard_shows_it():
    from tensorboard.plugin_util import markdown_to_safe_html

    answers = [answer("policy", HOSTILE, prompt="`"), answer("reference", "`|`")]
    shown = markdown_to_safe_html(as_markdown(side_by_side(answers, iteration=0)))
    body = shown.split("<tbody>")[1]
    assert re.findall(r"<(\w+)", body) == ["tr", "td", "td", "br", *["td"] * 6]
    cells = re.findall("<td>(.*?)</td>", body, re.DOTALL)
    texts = [html.unescape(re.sub("<br */?>", "\r\n", cell)) for cell in cells]
    assert texts[:3] == ["`", HOSTILE, "`|`"]


def test_markdown_keeps_texts_in_their_cells():
    parts = {"kind": 0.25, "p|t": 2.0}
    rows = side_by_side(
        [answer("policy", "a|b\n<c>", kl_ref=0.5, gold=3.0, components=parts)], iteration=0
    )
    assert rows[0]["policy_components"] == parts
    lines = as_markdown(rows).splitlines()
    assert len(lines) == 3
    assert lines[2] == (
        "| prompt 0 | a&#124;b<br>&lt;c&gt; |  | 1 | kind 0.25, p&#124;t 2 | 3 | 0.5 | 2 |"
    )
