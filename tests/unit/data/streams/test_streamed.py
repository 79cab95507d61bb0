import json
import logging
import re
import tracemalloc

import pytest

import ppo_lightning.data.streams.offsets as offsets
from ppo_lightning.data import FilePrompts, PromptReader, SplitPrompts, StreamedPrompts
from ppo_lightning.data.streams.streamed import streamed_order
from ppo_lightning.errors import ConfigError, DataError
from tests.helpers.tiny_models import byte_pair_tokenizer

TEXTS = [f"prompt {number}" for number in range(50)]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": text, "n": n}) + "\n" for n, text in enumerate(TEXTS))
    )
    return file


def feed(path, reader=None, **options):
    settings = {"tokenizer": byte_pair_tokenizer(), "chat": False} | (reader or {})
    return StreamedPrompts(path, **options).feed(PromptReader(**settings))


def texts(feed, position, count, seed=3):
    return [record.text for record in feed.take(position, count, seed=seed).records]


def said(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


# Reading


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_csv_quotes_inside_of_bare_cells_never_swallow_records(tmp_path, validate):
    path = tmp_path / "a.csv"
    path.write_text('prompt\tanswer\n5" pipe\t1\nhello\t2\n6" pipe\t3\nend\t4\n')
    options = {"on_error": "skip", "delimiter": "\t"}
    assert len(FilePrompts(path, **options).read()) == 4
    message = said(lambda: texts(feed(path, validate=validate, **options), 0, 2))
    assert f"{path}:2: " in message
    assert "as two" in message


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_csv_quote_that_is_never_closed_is_no_record_to_skip(tmp_path, validate):
    path = tmp_path / "a.csv"
    path.write_text('prompt,answer\nx,0\n"open,1\nlost,2\nlost too,3\n')
    options = {"on_error": "skip", "validate": validate}
    message = said(lambda: texts(feed(path, **options), 0, 2))
    assert f"{path}:3: " in message
    assert "never closed" in message


def test_csv_header_that_is_broken_is_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,answer\ra,1\rb,2\r")
    assert f"{path}:1: is not valid CSV" in said(feed, path)


BLANK = "\ufeff\na\n\u3000\n\x1c\nb\r\n\x85\nc\u2028d\n \u00a0\n\u3042\n\uff08\n"


@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_the_same_lines_are_blank_as_in_a_file_read_at_once(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    lines = [
        json.dumps({"prompt": t})
        if t.strip(" \r\ufeff") and ending == "jsonl" and not t.isspace()
        else t
        for t in BLANK.split("\n")
    ]
    text = "\n".join(lines)
    path.write_text(text if ending != "csv" else "prompt" + text[1:], "utf-8", newline="")
    whole, streamed = (
        [(raw.prompt, raw.origin) for raw in cls(path).read()]
        for cls in (FilePrompts, StreamedPrompts)
    )
    assert len(whole) == 5
    assert streamed == whole


# Order


def test_order_has_each_number_once_a_pass_and_passes_differ():
    order = streamed_order(10, 0, 30, seed=3)
    passes = [order[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert streamed_order(10, 0, 30, seed=4) != order


def test_order_depends_on_the_position_only():
    whole = streamed_order(10, 0, 42, seed=3)
    for size in (2, 3, 7):
        parts = [streamed_order(10, start, size, seed=3) for start in range(0, 42, size)]
        assert [number for part in parts for number in part] == whole


def test_order_is_the_same_on_every_machine():
    # As it came out when it was written: a run of then must resume in the same order.
    assert streamed_order(6, 4, 8, seed=1) == [2, 5, 3, 5, 4, 1, 0, 2]


def test_every_number_comes_first_about_equally_often():
    # 10 numbers, 1000 passes: 100 times each, deviation 9.5; 50 is more than five of them.
    first = [streamed_order(10, 10 * number, 1, seed=0)[0] for number in range(1000)]
    assert all(abs(first.count(number) - 100) < 50 for number in range(10))


# Prompts


def test_a_pass_has_every_prompt_once_with_metadata_and_origin(path):
    taken = feed(path).take(0, 50, seed=3)
    assert sorted(record.text for record in taken.records) == sorted(TEXTS)
    for record in taken.records:
        number = record.metadata["n"]
        assert record.text == TEXTS[number]
        assert record.origin == f"{path}:{number + 1}"
    assert taken.position == 50


def test_ids_are_those_of_prompts_in_memory(path):
    tokenizer = byte_pair_tokenizer()
    taken = feed(path).take(7, 5, seed=3)
    assert [list(ids) for ids in taken.ids] == [
        tokenizer(record.text)["input_ids"] for record in taken.records
    ]


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_t52_a_resume_in_the_middle_gives_the_same_next_prompts(path, validate):
    whole = texts(feed(path, validate=validate), 0, 120)
    first = feed(path, validate=validate).take(0, 33, seed=3)
    assert [record.text for record in first.records] == whole[:33]
    assert texts(feed(path, validate=validate), first.position, 87) == whole[33:]


@pytest.mark.parametrize("ending", ["jsonl", "txt", "csv", "tsv"])
def test_all_formats_stream_what_is_read_at_once(tmp_path, ending):
    file = tmp_path / f"p.{ending}"
    row = {
        "jsonl": lambda text: json.dumps({"prompt": text}),
        "txt": lambda text: text.replace("\n", " "),
        "csv": lambda text: f'"{text}",1',
        "tsv": lambda text: f'"{text}"\t1',
    }[ending]
    head = {"csv": "prompt,n\n", "tsv": "prompt\tn\n"}.get(ending, "")
    lines = [row(text if n % 3 else f"{text}\nsecond line") for n, text in enumerate(TEXTS[:20])]
    body = "\n\n".join(lines)
    file.write_bytes(b"\xef\xbb\xbf" + (head + body).encode())
    whole = [(raw.prompt, raw.metadata, raw.origin) for raw in FilePrompts(file).read()]
    assert [(raw.prompt, raw.metadata, raw.origin) for raw in StreamedPrompts(file).read()] == whole
    taken = feed(file).take(0, 20, seed=0)
    found = [(record.text, record.metadata, record.origin) for record in taken.records]
    assert sorted(found, key=str) == sorted(whole, key=str)


def test_tables_stream_what_is_read_at_once(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    columns = {"question": TEXTS, "n": list(range(50))}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet", row_group_size=7)
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    for name in ("p.parquet", "saved"):
        one = feed(tmp_path / name, fields={"prompt": "question"})
        whole = one.take(0, 60, seed=3)
        assert sorted(record.metadata["n"] for record in whole.records[:50]) == list(range(50))
        assert whole.records[0].origin.endswith(f": row {whole.records[0].metadata['n']}")
        again = feed(tmp_path / name, fields={"prompt": "question"}, validate="lazy")
        assert again.take(20, 40, seed=3).records == whole.records[20:]
        with pytest.raises(DataError, match=r"has no `q`.*keys found"):
            feed(tmp_path / name, fields={"prompt": "q", "x": "questio"}, validate="lazy")


# Bad records


@pytest.fixture
def damaged(path):
    lines = path.read_text().splitlines()
    lines[4], lines[9] = lines[4][:9], '{"question": "q"}'
    path.write_text("\n".join(lines))
    return path


def test_t04_bad_lines_are_all_named_before_the_run(damaged):
    message = said(feed, damaged)
    assert "2 of 50 records cannot be used" in message
    assert re.search(rf"{re.escape(str(damaged))}:5:\d+: is not valid JSON", message)
    assert f"{damaged}:10: has no `prompt`" in message


def test_t04_bad_lines_are_left_out_before_the_run_on_request(damaged, caplog):
    one = feed(damaged, on_error="skip")
    assert (len(one), one.num_skipped) == (48, 2)
    assert f"{damaged}:10: has no `prompt`" in caplog.text
    taken = one.take(0, 48, seed=3)
    assert taken.position == 48
    assert {record.text for record in taken.records} == set(TEXTS) - {TEXTS[4], TEXTS[9]}


def test_t04_lazily_a_bad_line_ends_the_run_when_its_turn_comes(damaged):
    one = feed(damaged, validate="lazy")
    message = said(one.take, 0, 50, seed=3)
    assert message.startswith((f"{damaged}:5:", f"{damaged}:10: has no"))
    assert "`on_error: skip`" in message


def test_t04_lazily_a_bad_line_gives_its_place_to_the_next_on_request(damaged, caplog):
    one = feed(damaged, validate="lazy", on_error="skip")
    with caplog.at_level(logging.WARNING):
        taken = one.take(0, 48, seed=3)
    assert {record.text for record in taken.records} == set(TEXTS) - {TEXTS[4], TEXTS[9]}
    assert one.num_skipped == 2
    assert f"skipped: {damaged}:10: has no `prompt`" in caplog.text
    # Batches of any size see the same order.
    found, position = [], 0
    for count in (1, 20, 27):
        part = one.take(position, count, seed=3)
        found += part.records
        position = part.position
    assert found == list(taken.records)


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_t05_another_encoding_is_always_an_error(path, validate):
    good = path.read_bytes()
    path.write_bytes(good + '{"prompt": "你好"}\n'.encode("gbk"))
    message = said(lambda: feed(path, validate=validate, on_error="skip").take(0, 51, seed=3))
    assert message.startswith(
        f"{path}:51: is not UTF-8: byte 0xc4 at byte position {len(good) + 12}"
    )


def test_a_block_of_nul_bytes_is_a_bad_line(path):
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert f"{path}:51:1: is not valid JSON" in said(feed, path)


def test_t06_long_prompts_are_dropped_and_the_next_take_their_places(path):
    tokens = max(len(byte_pair_tokenizer()(text)["input_ids"]) for text in TEXTS[:10])
    options = {"max_prompt_tokens": tokens, "overlong": "drop"}
    one = feed(path, options)
    first = one.take(0, 6, seed=3)
    rest = one.take(first.position, 4, seed=3)
    assert {record.text for record in (*first.records, *rest.records)} == set(TEXTS[:10])
    assert max(map(len, first.ids)) <= tokens
    assert one.num_dropped >= 30
    again = feed(path, options).take(first.position, 4, seed=3)
    assert again == rest


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_t06_what_the_limit_does_to_a_stream_is_counted_in_the_log(path, caplog, overlong):
    one = feed(path, {"max_prompt_tokens": 3, "overlong": overlong})
    with caplog.at_level(logging.WARNING):
        for position in range(50):
            one.at(position, 1, seed=3)
    said = [record.getMessage() for record in caplog.records]
    word = {"drop": "dropped so far: over 3 tokens", "truncate": "cut so far: to 3 tokens"}
    counts = [1, 2, 4, 8, 16, 32]  # a line for every prompt would be too many
    assert said == [f"{path}: {count} prompts {word[overlong]}" for count in counts]


TURNS = {
    "good": [("user", "hi")],
    "refused": [("user", "hi"), ("user", "there")],
}
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def chats(tmp_path):
    file = tmp_path / "c.jsonl"
    lines = (
        json.dumps({"messages": [{"role": r, "content": c} for r, c in TURNS[name]], "n": n})
        for n, name in enumerate(["good", "good", "refused", "good", "refused"])
    )
    file.write_text("\n".join(lines))
    tokenizer = byte_pair_tokenizer()
    tokenizer.chat_template = ALTERNATE
    return file, {"tokenizer": tokenizer, "chat": "auto"}


def test_chats_that_the_template_refuses_are_all_named_before_the_run(chats):
    path, reader = chats
    message = said(feed, path, reader)
    assert "2 of 5 records cannot be used" in message
    for line in (3, 5):
        assert f"{path}:{line}: the chat template refuses the chat: roles must" in message


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_chats_that_the_template_refuses_are_skipped_on_request(chats, validate):
    path, reader = chats
    one = feed(path, reader, validate=validate, on_error="skip")
    numbers = [record.metadata["n"] for record in one.take(0, 3, seed=3).records]
    assert sorted(numbers) == [0, 1, 3]
    assert one.num_skipped == 2


def test_lazily_a_chat_that_the_template_refuses_ends_the_run_when_its_turn_comes(chats):
    path, reader = chats
    message = said(feed(path, reader, validate="lazy").take, 0, 5, seed=3)
    assert "the chat template refuses" in message


def test_t06_long_prompts_are_an_error_or_truncated(path):
    assert "more than `max_prompt_tokens` = 3" in said(
        feed(path, {"max_prompt_tokens": 3}).take, 0, 5, seed=3
    )
    one = feed(path, {"max_prompt_tokens": 3, "overlong": "truncate"})
    taken = one.take(0, 5, seed=3)
    assert [len(ids) for ids in taken.ids] == [3] * 5
    assert one.num_truncated == 5


def test_t06_dropping_every_prompt_ends_with_an_error(path):
    one = feed(path, {"max_prompt_tokens": 1, "overlong": "drop"})
    assert "none of 50 prompts can be used" in said(one.take, 0, 1, seed=3)


def test_a_file_that_changes_during_the_run_ends_it(path):
    one = feed(path)
    one.take(0, 5, seed=3)
    path.write_text('{"prompt": "other"}\n')
    assert "has changed since" in said(one.take, 5, 5, seed=3)
    path.unlink()
    assert f"{path}: no such file" in said(one.take, 5, 5, seed=3)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.jsonl", "\n \n", "holds no record"),
        ("p.csv", "question\n", "holds no record"),
        ("p.csv", "", "is empty"),
        ("p.csv", "a,b\n1,2\n", "has no `question`"),
        ("p.json", "[]", "cannot be streamed"),
        ("p.xlsx", "", "not from `.xlsx`"),
    ],
)
def test_what_cannot_be_streamed_is_named(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    message = said(feed, tmp_path / name, fields={"prompt": "question"}, validate="lazy")
    assert message.startswith(f"{tmp_path / name}: ")
    assert expected in message


# Parts and duplicates


@pytest.mark.parametrize("validate", ["all", "lazy"])
def test_a_stream_can_be_split(path, validate):
    source = StreamedPrompts(path, validate=validate)
    parts = [SplitPrompts(source, name, share=0.4) for name in ("train", "validation")]
    train, held_out = ({raw.prompt for raw in part.read()} for part in parts)
    assert train | held_out == set(TEXTS)
    assert not train & held_out
    reader = PromptReader(tokenizer=byte_pair_tokenizer(), chat=False)
    taken = parts[0].feed(reader).take(0, len(train), seed=3)
    assert {record.text for record in taken.records} == train


def test_duplicates_of_a_stream_are_left_out_when_all_is_looked_at(path):
    path.write_text(path.read_text() * 2)
    one = feed(path, {"deduplicate": "exact"})
    assert (len(one), one.num_duplicates, len(one.keys())) == (50, 50, 50)
    assert sorted(texts(one, 0, 50)) == sorted(TEXTS)
    with pytest.raises(ConfigError, match="`validate: all`"):
        feed(path, {"deduplicate": "exact"}, validate="lazy")


def test_a_stream_that_was_not_looked_through_does_not_know_its_prompts(path):
    assert feed(path, validate="lazy").keys() is None
    assert len(feed(path).keys()) == 50


def test_settings_that_mean_nothing_are_refused(path):
    for option in ("validate", "on_error", "last_answer"):
        with pytest.raises(ValueError, match=f"`{option}` must be one of"):
            StreamedPrompts(path, **{option: "x"})


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    """Forty times the bytes, the same number of prompts taken: the same memory but for places."""
    monkeypatch.setattr(offsets, "_CHUNK", 1 << 16)  # below the size of both
    peaks = []
    for count in (500, 20_000):
        file = tmp_path / f"{count}.jsonl"
        with open(file, "w") as out:
            out.writelines(
                json.dumps({"prompt": f"prompt {n}", "filler": "x" * 500}) + "\n"
                for n in range(count)
            )
        tracemalloc.start()
        one = feed(file, validate="all")
        one.take(100, 50, seed=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 11 MB more of file; 16 bytes a record are kept, and about twice that while they are gathered.
    assert peaks[1] - peaks[0] < 1_500_000
