import json
import logging

import pytest

from ppo_lightning.data import as_records, read_examples
from ppo_lightning.errors import DataError

MIXED = "مرحبا، 你好，שלום 👩‍🚀 ñ"


def said(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


def write(folder, name, text):
    data = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(data)
    return folder / name


def rows(path, **options):
    return list(as_records(path, **options).records())


def values(path, **options):
    return [dict(record.values) for record in rows(path, **options)]


def lines(path, **options):
    return [int(record.origin.rpartition(":")[2]) for record in rows(path, **options)]


# JSON


def test_json_is_a_list_of_objects_or_strings(tmp_path):
    path = write(tmp_path, "a.json", json.dumps([{"prompt": MIXED}, "plain"]))
    found = rows(path, text_name="prompt")
    assert [record.values for record in found] == [{"prompt": MIXED}, {"prompt": "plain"}]
    assert [record.origin for record in found] == [f"{path}[0]", f"{path}[1]"]


def test_json_object_with_one_list_needs_no_key(tmp_path):
    path = write(tmp_path, "a.json", json.dumps({"version": 1, "data": [{"a": 1}]}))
    assert values(path) == [{"a": 1}]


def test_json_object_with_several_lists_needs_a_key(tmp_path):
    path = write(tmp_path, "a.json", json.dumps({"train": [{"a": 1}], "test": [{"a": 2}]}))
    assert "several lists (`train`, `test`)" in said(rows, path)
    assert values(path, key="test") == [{"a": 2}]
    assert "has no list under `dev`; keys found: `train`, `test`" in said(rows, path, key="dev")


def test_json_lines_under_the_wrong_ending_get_a_hint(tmp_path):
    path = write(tmp_path, "a.json", '{"a": 1}\n{"a": 2}\n')
    assert "give it the ending `.jsonl`" in said(rows, path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "an object without one"),
        ("3", "must hold a list of objects"),
        ("", "is not valid JSON"),
        ("[1]", "[0]: must be an object {...} or a string, got 1."),
    ],
)
def test_json_that_holds_no_records_is_named(tmp_path, text, expected):
    path = write(tmp_path, "a.json", text)
    assert expected in said(rows, path)


# CSV


def test_csv_columns_are_named_by_the_header(tmp_path):
    path = write(tmp_path, "a.csv", "prompt, n\none,1\n\n \ntwo,\n")
    assert values(path) == [{"prompt": "one", "n": "1"}, {"prompt": "two", "n": None}]
    assert lines(path) == [2, 5]


def test_csv_cells_may_hold_line_ends_and_line_numbers_stay_true(tmp_path):
    text = 'prompt,n\n"one\nand ""two"", \r\nthree",1\nfour,2\n"five\n",3\nsix,4'
    path = write(tmp_path, "a.csv", text)
    found = values(path)
    assert found[0]["prompt"] == 'one\nand "two", \r\nthree'
    assert [row["n"] for row in found] == ["1", "2", "3", "4"]
    assert lines(path) == [2, 5, 6, 8]


def test_csv_with_windows_line_ends_and_a_byte_order_mark(tmp_path):
    path = write(tmp_path, "a.csv", b"\xef\xbb\xbfprompt,n\r\none,1\r\n")
    assert values(path) == [{"prompt": "one", "n": "1"}]


def test_tsv_and_a_delimiter_of_ones_own(tmp_path):
    assert values(write(tmp_path, "a.tsv", "prompt\tn\na, b\t1\n")) == [
        {"prompt": "a, b", "n": "1"}
    ]
    path = write(tmp_path, "b.csv", "prompt;n\na, b;1\n")
    assert values(path, delimiter=";") == [{"prompt": "a, b", "n": "1"}]


def test_csv_ragged_rows_are_named_by_line(tmp_path):
    path = write(tmp_path, "a.csv", "prompt,n\none,1\ntwo\nthree,3,3\n")
    message = said(rows, path)
    assert f"{path}:3: has 1 cells, but the header names 2 columns." in message
    assert f"{path}:4: has 3 cells" in message


def test_csv_ragged_rows_can_be_skipped(tmp_path, caplog):
    path = write(tmp_path, "a.csv", "prompt,n\none,1\ntwo\nfour,4\n")
    with caplog.at_level(logging.WARNING):
        assert [row["prompt"] for row in values(path, on_error="skip")] == ["one", "four"]
    assert f"{path}:3: has 1 cells" in caplog.text


def test_csv_with_a_stray_quote_is_named_by_line(tmp_path):
    path = write(tmp_path, "a.csv", 'prompt,n\none,1\n"two" x,2\nthree,3\n')
    assert f"{path}:3: is not valid CSV" in said(rows, path)
    assert [row["n"] for row in values(path, on_error="skip")] == ["1", "3"]


def test_csv_quote_that_is_never_closed_is_no_record_to_skip(tmp_path):
    path = write(tmp_path, "a.csv", 'prompt,answer\nx,0\n"open,1\nlost,2\nlost too,3\n')
    message = said(values, path, on_error="skip")
    assert f"{path}:3: " in message
    assert "never closed" in message
    assert "up to line 5" in message


@pytest.mark.parametrize("header", ['"prompt"x,answer\n', "prompt,answer\ra,1\rb,2\r"])
def test_csv_header_that_is_broken_is_not_replaced_by_the_next_line(tmp_path, header):
    path = write(tmp_path, "a.csv", header + "a,1\n")
    assert f"{path}:1: is not valid CSV" in said(values, path, on_error="skip")


def test_csv_with_a_column_twice_is_refused(tmp_path):
    path = write(tmp_path, "a.csv", "prompt,n, prompt\n1,2,3\n")
    assert f"{path}:1: the header has two columns `prompt`." in said(rows, path)


@pytest.mark.parametrize(
    ("text", "expected"), [("", "is empty."), ("\n \n", "is empty."), ("prompt,n\n", "no usable")]
)
def test_csv_without_rows_is_named(tmp_path, text, expected):
    path = write(tmp_path, "a.csv", text)
    message = said(read_examples, as_records(path), lambda record: record)
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_csv_column_of_fields_is_missing_once_for_the_file(tmp_path):
    path = write(tmp_path, "a.csv", "question,n\n" + "a,1\n" * 20)
    message = said(rows, path, fields={"prompt": "qestion"})
    assert message.startswith(f"{path}: has no `qestion`, which `fields` names as `prompt`")
    assert message.endswith("Did you mean `question`?")


def test_csv_takes_long_cells(tmp_path):
    long = "x" * 200_000  # above the limit that Python starts with
    assert values(write(tmp_path, "a.csv", f"prompt\n{long}\n")) == [{"prompt": long}]


# All of them


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "txt"])
def test_t05_another_encoding_is_an_error_with_file_and_byte(tmp_path, ending):
    good = b"prompt\n"
    path = write(tmp_path, f"a.{ending}", good + "你好\n".encode("gbk"))
    options = {} if ending == "json" else {"on_error": "skip"}
    message = said(rows, path, **options)
    assert f"byte position {len(good)}" in message
    assert message.startswith(f"{path}:2: is not UTF-8")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "txt", "parquet"])
def test_a_folder_and_a_missing_file_are_named(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    assert said(rows, path).startswith(f"{path}: no such file")
    path.mkdir()
    assert said(rows, path) == f"{path}: is a folder; name the file."


@pytest.mark.parametrize("name", ["a.xlsx", "a", "a.jsonl.gz"])
def test_other_endings_are_refused_with_the_ones_there_are(name):
    message = said(as_records, name)
    assert message.startswith(f"{name}: records are read from `.jsonl`, `.json`, `.csv`, `.tsv`")


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.csv", {"split": "x"}), ("a.jsonl", {"key": "x"}), ("a.json", {"delimiter": ";"})],
)
def test_an_option_of_another_format_is_refused(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=f"`{option}` means nothing for `{name}`"):
        as_records(name, **options)
