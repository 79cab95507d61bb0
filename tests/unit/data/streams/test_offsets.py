import os

import numpy as np
import pytest

import ppo_lightning.data.streams.offsets as offsets
from ppo_lightning.data.streams.offsets import index_lines
from ppo_lightning.errors import DataError


def naive(data):
    """Byte offset and line number of each line that is not blank."""
    found, start = [], 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            found.append((start, number))
        start += len(line) + 1
    return found


def indexed(index):
    return [(int(start), index.line(number)) for number, start in enumerate(index.starts)]


TEXTS = {
    "plain": b"one\ntwo\nthree\n",
    "no end": b"one\ntwo",
    "blanks": b"\n\none\n \t\r\n\ntwo\n\n",
    "blank head": b"\none\ntwo\n",
    "indented": b"  one\n two\n   \n\tthree",
    "windows": b"one\r\n\r\ntwo\r\n",
    "nul": b"\0\0\0\none\n",
    "one": b"one",
    "empty": b"",
    "only blanks": b"\n\n \n",
}


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("name", TEXTS)
def test_lines_are_found_wherever_the_file_is_cut(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(offsets, "_CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(TEXTS[name])
    assert indexed(index_lines(path)) == naive(TEXTS[name])


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 20])
def test_quoted_line_ends_are_part_of_a_record(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(offsets, "_CHUNK", chunk)
    data = b'a,b\n"x\ny""\n",1\n\nz,"\n"\nw,2'
    path = tmp_path / "a.csv"
    path.write_bytes(data)
    assert indexed(index_lines(path, quoted=True)) == [(0, 1), (4, 2), (16, 6), (22, 8)]


def test_regular_files_need_no_line_numbers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\n" * 1000)
    assert index_lines(path).lines is None
    path.write_bytes(b"\n\n" + b"x\n" * 1000)
    index = index_lines(path)
    assert (index.lines, index.first_line, index.line(999)) == (None, 3, 1002)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n")
    index = index_lines(path)
    index.check(path)
    path.write_bytes(b"one\ntwo\nthree\n")
    with pytest.raises(DataError, match=r"a\.txt: has changed since"):
        index.check(path)


def test_the_index_is_kept_beside_the_file_on_request(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\n")
    assert indexed(index_lines(path)) == [(0, 1), (5, 3)]
    assert os.listdir(tmp_path) == ["a.txt"]
    made = index_lines(path, cache=True)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "a.txt.index.npz"]
    scan = offsets._scan
    monkeypatch.setattr(offsets, "_scan", None)  # it would be called
    kept = index_lines(path, cache=True)
    assert indexed(kept) == indexed(made)
    assert kept.stamp == made.stamp
    monkeypatch.setattr(offsets, "_scan", scan)
    assert len(index_lines(path, cache=True, quoted=True)) == 2
    path.write_bytes(b"one\ntwo\nthree\n")
    assert indexed(index_lines(path, cache=True)) == [(0, 1), (4, 2), (8, 3)]


@pytest.mark.parametrize("content", [b"", b"no index", b"PK\x03\x04"])
def test_a_damaged_index_is_made_anew(tmp_path, caplog, content):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\n")
    (tmp_path / "a.txt.index.npz").write_bytes(content)
    assert len(index_lines(path, cache=True)) == 2
    assert "not a usable index" in caplog.text
    with np.load(tmp_path / "a.txt.index.npz") as kept:
        assert kept["starts"].tolist() == [0, 4]


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_stop(tmp_path, monkeypatch, caplog):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n")

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(offsets, "open_atomic", refuse)
    assert len(index_lines(path, cache=True)) == 1
    assert "the index is not kept" in caplog.text
