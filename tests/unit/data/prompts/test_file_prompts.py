import json

import pytest

from ppo_lightning.data import FilePrompts, PromptList, PromptSet, as_source
from ppo_lightning.errors import DataError
from tests.helpers.tiny_models import word_tokenizer

ROWS = [{"q": "the cat", "answer": "1"}, {"q": "a dog", "answer": "2"}]


def write(folder, ending):
    path = folder / f"p.{ending}"
    text = {
        "jsonl": "\n".join(map(json.dumps, ROWS)),
        "json": json.dumps({"data": ROWS}),
        "csv": "q,answer\nthe cat,1\na dog,2\n",
        "tsv": "q\tanswer\nthe cat\t1\na dog\t2\n",
    }[ending]
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv"])
def test_all_formats_give_the_same_prompts(tmp_path, ending):
    prompts = FilePrompts(write(tmp_path, ending), fields={"prompt": "q"}).read()
    assert [(raw.prompt, raw.metadata) for raw in prompts] == [
        ("the cat", {"answer": "1"}),
        ("a dog", {"answer": "2"}),
    ]


@pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv"])
def test_bad_records_of_all_formats_are_named_by_line(tmp_path, ending):
    message = ""
    path = write(tmp_path, ending)
    with pytest.raises(DataError) as caught:
        FilePrompts(path).read()
    message = str(caught.value)
    first = 1 if ending == "jsonl" else 2
    assert f"{path}:{first}: has no `prompt` or `messages`; keys found: `q`, `answer`." in message
    assert "2 of 2 records" in message


def test_a_path_alone_is_enough(tmp_path):
    (tmp_path / "p.csv").write_text("prompt\nthe cat\n")
    source = as_source(tmp_path / "p.csv")
    assert isinstance(source, FilePrompts)
    assert [raw.prompt for raw in source.read()] == ["the cat"]


def test_text_lines_are_prompts(tmp_path):
    (tmp_path / "p.txt").write_text("the cat\n\na dog\n")
    found = FilePrompts(tmp_path / "p.txt").read()
    assert [(raw.prompt, raw.origin[-2:]) for raw in found] == [("the cat", ":1"), ("a dog", ":3")]


# Duplicates

DOUBLE = [
    "the cat",
    "The  CAT",
    "a dog",
    "the cat",
    {"messages": [{"role": "user", "content": "a dog"}]},
]


@pytest.mark.parametrize(
    ("choice", "kept"), [(None, [0, 1, 2, 3, 4]), ("exact", [0, 1, 2]), ("normalized", [0, 2])]
)
def test_duplicates_are_left_out_by_choice_counted_and_logged(choice, kept, caplog):
    prompts = PromptSet.build(PromptList(DOUBLE), word_tokenizer(), chat=True, deduplicate=choice)
    assert [record.origin for record in prompts.records] == [f"prompts[{n}]" for n in kept]
    assert prompts.num_duplicates == 5 - len(kept)
    assert ("duplicates" in caplog.text) == (choice is not None)
