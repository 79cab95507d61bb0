import errno
import json
import math
import os
import stat
import subprocess
import sys

import pytest

from ppo_lightning import io
from ppo_lightning.errors import DataError

RECORDS = [{"prompt": "你好, 世界"}, {"prompt": "🙂 مرحبا"}, {"prompt": "plain"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
BOM = b"\xef\xbb\xbf"


def records(path, **options):
    return [record for _, record in io.read_jsonl(path, **options)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "records.jsonl"


# Reading


def test_byte_order_mark_makes_no_difference(path):
    """T03."""
    path.write_bytes(BOM + LINES.encode())
    assert list(io.read_jsonl(path)) == list(enumerate(RECORDS, start=1))
    assert io.read_text(path) == LINES


def test_byte_order_mark_alone_is_an_empty_file(path):
    path.write_bytes(BOM)
    assert records(path) == []
    assert io.read_text(path) == ""


def test_byte_order_mark_inside_the_file_is_content(path):
    path.write_bytes(b'{"a": 1}\n' + BOM + b'{"a": 2}\n')
    with pytest.raises(DataError, match=r"records\.jsonl:2:1: is not valid JSON"):
        records(path)


def test_blank_lines_are_skipped_but_counted(path):
    """T04: also white space only, Windows line ends, and a last line without its end."""
    path.write_bytes(b'{"a": 1}\r\n\n  \t\n{"a": 2}')
    assert list(io.read_jsonl(path)) == [(1, {"a": 1}), (4, {"a": 2})]


def test_line_cut_in_half_is_named(path):
    """T04."""
    path.write_text('{"a": 1}\n\n{"a": "ha\n{"a": 2}\n')
    with pytest.raises(DataError, match=r"records\.jsonl:3:\d+: is not valid JSON: .*Mend") as info:
        records(path)
    assert (info.value.path, info.value.line) == (str(path), 3)


@pytest.mark.parametrize(
    ("line", "kind"), [("[1]", "array"), ('"a"', "string"), ("7", "number"), ("null", "null")]
)
def test_line_that_is_no_object_is_named_with_what_it_is(path, line, kind):
    path.write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(DataError, match=rf"records\.jsonl:2: holds a JSON {kind}.*one object"):
        records(path)


UNREADABLE = {
    "nested": ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "brackets are nested too deeply"),
    "long": ('{"a": ' + "7" * 5000 + "}", r"a whole number in it has more than \d+ digits"),
}


@pytest.mark.parametrize(("line", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_json_that_python_cannot_hold_is_named_by_its_line(path, line, said):
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(DataError, match=rf"records\.jsonl:2: is not usable JSON: .*{said}.*Mend"):
        records(path)
    bad = []
    assert list(io.read_jsonl(path, on_bad=bad.append)) == [(1, {"a": 1}), (3, {"a": 2})]
    assert [error.line for error in bad] == [2]


def test_bad_lines_can_be_skipped_and_counted(path):
    """T04."""
    path.write_bytes(b'{"a": 1}\n{"a"\n[]\n\xff\n{"a": 2}\n')
    bad = []
    assert list(io.read_jsonl(path, on_bad=bad.append)) == [(1, {"a": 1}), (5, {"a": 2})]
    assert [error.line for error in bad] == [2, 3, 4]


def test_unicode_line_separators_inside_a_string_end_no_line(path):
    path.write_text('{"a": "x\u2028y\u0085z"}\n', encoding="utf-8")
    assert records(path) == [{"a": "x\u2028y\u0085z"}]


def test_records_are_read_as_they_are_asked_for(path):
    path.write_text('{"a": 1}\nbroken\n')
    assert next(io.read_jsonl(path)) == (1, {"a": 1})


@pytest.mark.parametrize("head", [b"", BOM])
def test_other_encoding_is_named_with_file_line_and_byte(path, head):
    """T05: a GBK file."""
    first = head + b'{"prompt": "plain"}\n'
    path.write_bytes(first + '{"prompt": "你好"}\n'.encode("gbk"))
    position = len(first) + len('{"prompt": "')
    match = rf"records\.jsonl:2: is not UTF-8: byte 0xc4 at byte position {position}\..*iconv"
    with pytest.raises(DataError, match=match):
        records(path)
    with pytest.raises(DataError, match=match):
        io.read_text(path)


def test_utf_16_is_another_encoding(path):
    path.write_bytes(LINES.encode("utf-16"))
    with pytest.raises(DataError, match="byte 0xff at byte position 0"):
        records(path)


def test_json_error_names_line_and_column(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{\n  "a": 1,\n  oops\n}\n')
    with pytest.raises(DataError, match=r"a\.json:3:3: is not valid JSON"):
        io.read_json(file)


def test_missing_file_names_itself(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        records(tmp_path / "nowhere.jsonl")


# Writing


@pytest.mark.parametrize("value", [{"a": [1, None, "你好 🙂"]}, [], "text", math.inf])
def test_json_round_trip(tmp_path, value):
    io.write_json_atomic(tmp_path / "a.json", value)
    assert io.read_json(tmp_path / "a.json") == value


def test_nan_survives_the_round_trip(tmp_path):
    io.write_json_atomic(tmp_path / "a.json", {"a": math.nan})
    assert math.isnan(io.read_json(tmp_path / "a.json")["a"])


def test_text_is_written_as_utf_8_with_its_own_line_ends(tmp_path):
    io.write_text_atomic(tmp_path / "a.txt", "你\r\n好\n")
    assert (tmp_path / "a.txt").read_bytes() == "你\r\n好\n".encode()


def test_half_a_surrogate_pair_survives(path):
    io.append_jsonl(path, {"a": "\ud83d 你"})
    assert records(path) == [{"a": "\ud83d 你"}]


def test_folder_is_made(tmp_path):
    io.write_text_atomic(tmp_path / "x" / "y" / "a.txt", "a")
    io.append_jsonl(tmp_path / "z" / "a.jsonl", {})
    assert io.read_text(tmp_path / "x" / "y" / "a.txt") == "a"
    assert records(tmp_path / "z" / "a.jsonl") == [{}]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="midway"), io.open_atomic(file) as out:  # noqa: PT012
        out.write(b"new")
        raise RuntimeError("midway")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_file_appears_only_when_complete(tmp_path):
    with io.open_atomic(tmp_path / "a.bin") as out:
        out.write(b"new")
        assert not (tmp_path / "a.bin").exists()
    assert (tmp_path / "a.bin").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_bytes_reach_the_disk_before_the_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(descriptor):
        what = os.fstat(descriptor)
        order.append(("fsync", "folder" if stat.S_ISDIR(what.st_mode) else what.st_size))
        fsync(descriptor)

    def logged_replace(source, target):
        order.append(("replace", os.path.dirname(source) == os.path.dirname(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    io.write_text_atomic(tmp_path / "a.txt", "four")
    assert order == [("fsync", 4), ("replace", True), ("fsync", "folder")]


def test_value_that_is_no_json_leaves_the_file(tmp_path):
    file = tmp_path / "a.json"
    io.write_json_atomic(file, {"a": 1})
    with pytest.raises(TypeError):
        io.write_json_atomic(file, {"a": object()})
    assert io.read_json(file) == {"a": 1}


def test_new_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "plain").touch()
    io.write_text_atomic(tmp_path / "atomic", "")
    plain, atomic = ((tmp_path / name).stat().st_mode for name in ("plain", "atomic"))
    assert stat.S_IMODE(atomic) == stat.S_IMODE(plain)


def test_symbolic_link_stays_a_link(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    io.write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_a_link_is_replaced_where_that_is_asked_for(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with io.open_atomic(tmp_path / "link", follow_links=False) as out:
        out.write(b"new")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "new"
    assert (tmp_path / "target").read_text() == "old"


def test_each_line_is_there_as_soon_as_written(path):
    with io.JsonlWriter(path) as writer:
        for number, record in enumerate(RECORDS, start=1):
            writer.write(record)
            assert records(path) == RECORDS[:number]


def test_writer_appends_unless_told_to_start_anew(path):
    for append, expected in [(True, 1), (True, 2), (False, 1)]:
        with io.JsonlWriter(path, append=append) as writer:
            writer.write({"a": 1})
        assert len(records(path)) == expected


def test_writer_does_not_stick_to_a_line_cut_short(path):
    path.write_bytes(b'{"a": 1}\n{"a": ')
    io.append_jsonl(path, {"a": 3})
    bad = []
    assert records(path, on_bad=bad.append) == [{"a": 1}, {"a": 3}]
    assert [error.line for error in bad] == [2]


def test_record_that_is_no_json_writes_nothing(path):
    with io.JsonlWriter(path) as writer:
        with pytest.raises(TypeError):
            writer.write({"a": 1, "b": object()})
        writer.write({"a": 2})
    assert records(path) == [{"a": 2}]


ROUND_TRIP = """
import sys
from ppo_lightning import io
rows = [row for _, row in io.read_jsonl(sys.argv[1])]
io.write_json_atomic(sys.argv[2], rows)
io.write_text_atomic(sys.argv[3], io.read_text(sys.argv[1]))
with io.JsonlWriter(sys.argv[4]) as writer:
    for row in io.read_json(sys.argv[2]):
        writer.write(row)
"""


def test_locale_is_not_asked(path, tmp_path):
    """T05: the C locale, with Python's own ways round it switched off."""
    path.write_bytes(LINES.encode())
    copies = [str(tmp_path / name) for name in ("a.json", "b.txt", "c.jsonl")]
    environment = {**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0"}
    # `EncodingWarning` is raised wherever a file is opened in the locale's encoding.
    flags = ["-X", "utf8=0", "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    subprocess.run(
        [sys.executable, *flags, "-c", ROUND_TRIP, str(path), *copies],
        env=environment,
        check=True,
        timeout=60,
    )
    assert io.read_json(copies[0]) == RECORDS
    assert io.read_text(copies[1]) == io.read_text(copies[2]) == LINES


def test_earlier_files_get_the_next_free_number(tmp_path):
    path = tmp_path / "config.yaml"
    assert io.set_aside(path) is None
    for number in (1, 2):
        path.write_text(str(number), encoding="utf-8")
        assert io.set_aside(path) == tmp_path / f"config.{number}.yaml"
        assert not path.exists()
    kept = [(tmp_path / f"config.{n}.yaml").read_text(encoding="utf-8") for n in (1, 2)]
    assert kept == ["1", "2"]


# Errors of the file system


class FullDisk:
    """A file on a disk without room: the system's error for a write does not name the file."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_names_the_file_of_records(path):
    with io.JsonlWriter(path) as writer:
        writer._file = FullDisk(writer._file)
        with pytest.raises(OSError, match="No space left") as caught:
            writer.write({"a": 1})
        assert caught.value.filename == str(path)


def test_a_full_disk_names_the_file_that_was_to_appear(path):
    with pytest.raises(OSError, match="No space left") as caught, io.open_atomic(path) as file:
        FullDisk(file).write(b"1")
    assert caught.value.filename == str(path)
    assert list(path.parent.iterdir()) == []


def test_names_that_are_there_and_errors_of_other_kinds_stay(path):
    with pytest.raises(FileNotFoundError) as caught, io.naming(path):
        open(path.with_name("other"), "rb").close()
    assert caught.value.filename == str(path.with_name("other"))
    with pytest.raises(OSError, match=r"^by hand$") as caught, io.naming(path):
        raise OSError("by hand")
    assert caught.value.filename is None


def test_what_json_cannot_say_becomes_null():
    record = {"a": float("nan"), "b": [1.5, float("inf")], "c": {"d": float("-inf")}, "e": "ä|\n"}
    text = io.as_jsonl([record, {}])
    assert text.endswith("\n{}\n")
    assert json.loads(text.splitlines()[0]) == {
        "a": None,
        "b": [1.5, None],
        "c": {"d": None},
        "e": "ä|\n",
    }


def test_names_in_a_picture_become_its_own():
    drawn = (
        '<svg id="a"><defs><path id="m1"/></defs><use xlink:href="#m1"/>'
        '<g clip-path="url(#c)" style="fill: url(#m1)" data-grid="m1">#m1</g></svg>'
    )
    assert io.own_ids(drawn, "kl") == (
        '<svg id="kl-a"><defs><path id="kl-m1"/></defs><use xlink:href="#kl-m1"/>'
        '<g clip-path="url(#kl-c)" style="fill: url(#kl-m1)" data-grid="m1">#m1</g></svg>'
    )
    assert 'id="kl-a"' not in io.own_ids(drawn, "score")
