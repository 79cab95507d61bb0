"""Parquet files and Hugging Face datasets."""

import pytest

from ppo_lightning.data import FilePrompts, StreamedPrompts, as_records
from ppo_lightning.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

COLUMNS = {"prompt": ["one", None, "three"], "score": [1.5, 2.0, None], "tags": [["a"], [], None]}


def said(call, *args, **options):
    with pytest.raises(DataError) as caught:
        call(*args, **options)
    return str(caught.value)


def rows(path, **options):
    return list(as_records(path, **options).records())


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table(COLUMNS), path, row_group_size=2)
    return path


@pytest.fixture
def folder(tmp_path):
    datasets.Dataset.from_dict(COLUMNS).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def splits(tmp_path):
    tables = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "splits")
    return tmp_path / "splits"


def test_parquet_rows_are_plain_python_and_named_by_number(parquet):
    found = rows(parquet)
    assert [record.values["prompt"] for record in found] == COLUMNS["prompt"]
    assert [record.values["tags"] for record in found] == COLUMNS["tags"]
    assert found[2].origin == f"{parquet}: row 2"


def test_parquet_row_without_a_prompt_is_named(parquet):
    message = said(FilePrompts(parquet).read)
    assert (
        f"{parquet}: row 1: has no `prompt` or `messages`; keys found: `prompt` (null)" in message
    )
    skipping = FilePrompts(parquet, on_error="skip")
    assert [raw.prompt for raw in skipping.read()] == ["one", "three"]
    assert skipping.num_skipped == 1


def test_nan_in_the_place_of_a_prompt_is_no_prompt(tmp_path):
    path = tmp_path / "nan.parquet"
    pq.write_table(pa.table({"prompt": [float("nan")]}), path)
    assert "keys found: `prompt` (NaN)" in said(FilePrompts(path).read)


def test_parquet_cells_may_hold_chats_as_lists_or_as_json_text(tmp_path):
    turns = [{"role": "user", "content": "Hi"}]
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": [turns]}), path)
    text = tmp_path / "chats.csv"
    text.write_text('messages\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n')
    for file in (path, text):
        assert FilePrompts(file).read()[0].messages == tuple(turns)


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("prompt\n")
    assert said(rows, path).startswith(f"{path}: is no Parquet file")


def damaged(path):
    pq.write_table(pa.table({"prompt": ["x" * 50 + str(n) for n in range(20_000)]}), path)
    data = bytearray(path.read_bytes())
    data[2000:2400] = (byte ^ 0xFF for byte in data[2000:2400])
    path.write_bytes(data)


def no_text(path):
    buffers = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    pq.write_table(pa.table({"prompt": pa.Array.from_buffers(pa.string(), 1, buffers)}), path)


def twice(path):
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "prompt"]), path)


def empty(path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)


@pytest.mark.parametrize("source", [FilePrompts, StreamedPrompts])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (damaged, "cannot be "),
        (no_text, "not UTF-8"),
        (twice, "two columns `prompt`"),
        (empty, "holds no"),
    ],
)
def test_parquet_that_cannot_be_used_is_named(tmp_path, monkeypatch, source, make, expected):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    make(tmp_path / "a.parquet")
    message = said(source(tmp_path / "a.parquet", on_error="skip").read)
    assert message.startswith(f"{tmp_path}/a.parquet: ")
    assert expected in message


def test_parquet_of_a_kind_that_datasets_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    maps = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["a"], "counts": maps}), tmp_path / "a.parquet")
    message = said(StreamedPrompts(tmp_path / "a.parquet").read)
    assert message.startswith(f"{tmp_path}/a.parquet: cannot be streamed")
    assert "FilePrompts" in message


def test_bytes_are_no_prompt(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([b"hi"], pa.binary())}), tmp_path / "a.parquet")
    message = said(FilePrompts(tmp_path / "a.parquet").read)
    assert "`prompt` must be a string or a list of turns, got b'hi'" in message


def test_parquet_column_of_fields_is_missing_with_what_may_be_meant(parquet):
    assert "Did you mean `prompt`?" in said(rows, parquet, fields={"text": "promt"})


def test_saved_dataset_gives_its_rows(folder):
    found = rows(str(folder), fields={"text": "prompt"})
    assert [record.values["text"] for record in found] == COLUMNS["prompt"]
    assert found[2].origin == f"{folder}: row 2"


def test_dataset_in_python_gives_plain_values_whatever_its_format():
    table = datasets.Dataset.from_dict({"n": [[1, 2]]}).with_format("numpy")
    (record,) = rows(table)
    assert record.values == {"n": [1, 2]}
    assert type(record.values["n"]) is list


def test_dataset_with_several_splits_needs_a_choice(splits):
    assert "has the splits `train`, `test`: choose one with `split`" in said(rows, splits)
    assert [record.values for record in rows(splits, split="test")] == [{"prompt": "test"}]
    assert "only `train`, `test`. Did you mean `train`?" in said(rows, splits, split="trains")


def test_dataset_of_one_split_needs_none(tmp_path, folder):
    one = datasets.DatasetDict(all=datasets.Dataset.from_dict({"prompt": ["x"]}))
    one.save_to_disk(tmp_path / "one")
    assert [record.values for record in rows(tmp_path / "one")] == [{"prompt": "x"}]
    assert "it is one table" in said(rows, folder, split="train")


def test_a_folder_of_something_else_is_named(tmp_path):
    message = said(rows, tmp_path)
    assert message.startswith(f"{tmp_path}: is a folder, but not one that `save_to_disk`")


def test_a_damaged_folder_is_named(folder):
    (folder / "state.json").write_text("{")
    assert said(rows, folder).startswith(f"{folder}: cannot be opened as a dataset")


def test_hub_without_a_connection_says_what_to_do(monkeypatch):
    def offline(name):
        assert name == "some/name"
        raise ConnectionError("Couldn't reach 'some/name' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    message = said(rows, "hub:some/name:train")
    assert message.startswith("hub:some/name:train: cannot be loaded from the hub: Couldn't reach")
    assert "save_to_disk" in message


def test_hub_name_and_split(monkeypatch):
    tables = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test")}
    monkeypatch.setattr(datasets, "load_dataset", lambda name: datasets.DatasetDict(tables))
    assert [record.values for record in rows("hub:some/name:test")] == [{"prompt": "test"}]
    assert "hub:NAME" in said(rows, "hub:")


def test_a_missing_package_is_named_with_the_extra(monkeypatch, parquet):
    import ppo_lightning.rewards.extras as extras

    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pyarrow.*pip install 'ppo-lightning\[data\]'"):
        rows(parquet)
