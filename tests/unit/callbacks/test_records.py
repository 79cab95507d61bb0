import json

from ppo_lightning.callbacks.records import as_jsonl


def test_what_json_cannot_say_becomes_null():
    record = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": float("-inf")}, "e": "ä|\n"}
    text = as_jsonl([record, {}])
    assert text.endswith("\n{}\n")
    assert json.loads(text.splitlines()[0]) == {
        "a": None,
        "b": [1.5, None],
        "c": {"d": None},
        "e": "ä|\n",
    }
