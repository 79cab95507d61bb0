import pytest

from ppo_lightning.data import FunctionPrompts, FunctionRecords
from ppo_lightning.errors import ConfigError, DataError

MODULE = """
def sums(largest, scale=1.0):
    for a in range(1, largest + 1):
        yield {"question": f"{a} + {a} =", "answer": 2 * a * scale}

def strings(): return ["the cat", "a dog"]
def text(): return "the cat"
def number(): return 7
def mixed(): return ["fine", 3]
def nothing(): return []
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    return f"{tmp_path}/own.py"


def test_a_function_yields_objects_under_ones_own_names(file):
    arguments = {"largest": 2, "scale": "1e-1"}
    source = FunctionPrompts(f"{file}:sums", arguments, fields={"prompt": "question"})
    found = source.read()
    assert [(raw.prompt, raw.metadata) for raw in found] == [
        ("1 + 1 =", {"answer": 0.2}),
        ("2 + 2 =", {"answer": 0.4}),
    ]
    assert found[1].origin == f"{file}:sums[1]"
    assert source.read() == found


def test_a_function_may_return_strings(file):
    assert [raw.prompt for raw in FunctionPrompts(f"{file}:strings").read()] == ["the cat", "a dog"]
    records = FunctionRecords(f"{file}:strings", text_name="line").records()
    assert [record.values for record in records] == [{"line": "the cat"}, {"line": "a dog"}]


def test_a_function_of_a_module_is_found():
    source = FunctionRecords("string:ascii_lowercase.split")
    assert [record.values["text"] for record in source.records()] == ["abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize(
    ("name", "expected"), [("text", "got 'the cat'"), ("number", "must return a list")]
)
def test_what_is_no_list_is_refused(file, name, expected):
    with pytest.raises(ConfigError, match=expected):
        FunctionPrompts(f"{file}:{name}").read()


def test_bad_entries_are_named_by_their_place(file):
    with pytest.raises(
        DataError, match=r"own\.py:mixed\[1\]: must be a string or an object, got 3"
    ):
        FunctionPrompts(f"{file}:mixed").read()
    source = FunctionPrompts(f"{file}:mixed", on_error="skip")
    assert [raw.prompt for raw in source.read()] == ["fine"]
    assert source.num_skipped == 1
    with pytest.raises(DataError, match="the list is empty"):
        FunctionPrompts(f"{file}:nothing").read()


def test_a_function_or_argument_that_is_not_there_is_named(file):
    with pytest.raises(ConfigError, match="has no `sum`"):
        FunctionPrompts(f"{file}:sum").read()
    with pytest.raises(ConfigError, match="did you mean `largest`"):
        FunctionPrompts(f"{file}:sums", {"larges": 2}).read()
    with pytest.raises(ConfigError, match="must have the form"):
        FunctionPrompts("sums")
