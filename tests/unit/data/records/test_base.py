import logging

import numpy as np
import pytest

from ppo_lightning.data import BadRecords, ListRecords, Record, as_records, read_examples
from ppo_lightning.errors import DataError


def said(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


def values(source):
    return [dict(record.values) for record in source.records()]


def test_a_list_holds_objects_and_strings_by_their_place():
    source = as_records([{"prompt": "a", "n": 1}, "b"], name="pairs", text_name="prompt")
    found = list(source.records())
    assert [record.values for record in found] == [{"prompt": "a", "n": 1}, {"prompt": "b"}]
    assert [record.origin for record in found] == ["pairs[0]", "pairs[1]"]


def test_a_source_is_returned_as_it_is():
    source = ListRecords(["a"])
    assert as_records(source) is source


def test_fields_give_columns_our_names_and_keep_the_others():
    fields = {"prompt": "question", "answer": None}
    source = as_records([{"question": "q", "answer": "a", "id": 3}], fields=fields)
    assert values(source) == [{"prompt": "q", "id": 3}]


def test_fields_may_swap_names_and_name_one_column_twice():
    source = as_records([{"a": 1, "b": 2}], fields={"a": "b", "b": "a", "c": "a"})
    assert values(source) == [{"a": 2, "b": 1, "c": 1}]


def test_strings_keep_their_name_under_a_mapping():
    assert values(as_records(["x"], fields={"prompt": "text"})) == [{"prompt": "x"}]


def test_a_column_that_is_missing_is_named_with_what_may_be_meant():
    source = as_records([{"qestion": "x"}], fields={"prompt": "question"})
    message = said(lambda: list(source.records()))
    assert "list[0]: has no `question`, which `fields` names as `prompt`" in message
    assert "keys found: `qestion`. Did you mean `qestion`?" in message


def test_numpy_values_become_plain_python():
    entry = {"a": np.float64(1.5), "b": np.arange(3), "c": {"d": (np.int64(2),)}, "e": np.str_("x")}
    (record,) = as_records([entry]).records()
    assert record.values == {"a": 1.5, "b": [0, 1, 2], "c": {"d": [2]}, "e": "x"}
    flat = (record.values["a"], record.values["b"][0], record.values["c"]["d"][0])
    assert [type(value) for value in (*flat, record.values["e"])] == [float, int, int, str]


def test_a_required_value_is_named_with_the_keys_and_the_setting():
    record = Record({"promt": "x", "n": None}, "f.jsonl:3")
    message = said(record.required, "prompt")
    assert message.startswith("f.jsonl:3: has no `prompt`; keys found: `promt`, `n` (null).")
    assert "Did you mean `promt`?" in message
    assert "`fields: {prompt: promt}`" in message


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_null_and_nan_are_no_values(missing):
    assert "has no `prompt`; keys found: `prompt` (" in said(
        Record({"prompt": missing}).required, "prompt"
    )


def test_all_bad_records_come_in_one_report():
    source = as_records([{"x": 1}, {"prompt": "ok"}, 5, {"y": 2}])
    message = said(read_examples, source, lambda record: record.required("prompt"))
    assert message.startswith("list[0]: 3 of 4 records cannot be used:")
    assert all(f"\n  list[{number}]: " in message for number in (0, 2, 3))
    assert "`on_error: skip`" in message


def test_bad_records_are_skipped_counted_and_logged_on_request(caplog):
    source = as_records([{"x": 1}, {"prompt": "ok"}, 5], on_error="skip")
    with caplog.at_level(logging.WARNING):
        assert read_examples(source, lambda record: record.required("prompt")) == ["ok"]
    assert source.num_skipped == 2
    assert "list[2]: must be a string or an object, got 5." in caplog.text


def test_reading_without_a_collector_reports_at_the_end():
    source = as_records([{"a": 1}, 5])
    found = []
    message = said(lambda: found.extend(source.records()))
    assert "1 of 2 records" in message
    assert len(found) == 1


def test_only_the_first_ten_are_spelled_out_and_kept():
    bad = BadRecords("f")
    for number in range(25):
        bad.add(DataError("is bad.", path="f", line=number + 1))
    message = said(bad.report)
    assert message.count("is bad.") == 10
    assert "... and 15 more" in message
    assert message.startswith("f:1: 25 of 25")


def test_no_example_left_is_an_error_even_when_skipping():
    source = as_records([{"x": 1}], on_error="skip")
    assert "no usable record" in said(read_examples, source, lambda r: r.required("prompt"))


def test_an_empty_list_is_named():
    assert said(lambda: list(as_records([], name="pairs").records())) == "pairs: the list is empty."


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="`on_error` must be one of error, skip, got 'ignore'"):
        as_records(["a"], on_error="ignore")
