"""Files: UTF-8 whatever the locale says, never half-written, and errors that name the place.

Everything is read and written as bytes and decoded here, so neither the locale's encoding nor the
platform's line ends can get in.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from uuid import uuid4

from ppo_lightning.errors import DataError

__all__ = [
    "JsonlWriter",
    "append_jsonl",
    "decode",
    "naming",
    "open_atomic",
    "own_ids",
    "parse_record",
    "read_json",
    "read_jsonl",
    "read_text",
    "set_aside",
    "write_json_atomic",
    "write_text_atomic",
]

StrPath = str | os.PathLike[str]

_BOM = b"\xef\xbb\xbf"


def read_text(path: StrPath) -> str:
    """Return a UTF-8 file as text, without a byte-order mark at its head.

    Line ends are left as they are.

    Raises:
        DataError: A byte is not UTF-8; names file, line and byte position.
        OSError: The file cannot be opened.
    """
    return decode(Path(path).read_bytes(), path)


def read_json(path: StrPath) -> Any:
    """Return the value in a JSON file.

    Raises:
        DataError: Not UTF-8 or not JSON; names file, line and column.
        OSError: The file cannot be opened.
    """
    return _parse(read_text(path), path)


def read_jsonl(
    path: StrPath, *, on_bad: Callable[[DataError], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    r"""Read a JSONL file line by line; lines end at ``\n`` only.

    Blank lines are skipped, a byte-order mark at the head of the file is dropped, the last line
    may lack its line end.

    Args:
        path: The file, one JSON object a line.
        on_bad: Called with the error of a bad line, which is then skipped (so that a caller may
            count it); without it the first bad line raises.

    Yields:
        ``(line_number, record)``, counted from 1 over all lines, blank ones too.

    Raises:
        DataError: A line is not UTF-8, not JSON or not an object; names file, line and place.
        OSError: The file cannot be opened.
    """
    offset = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                record = parse_record(raw, path, number, offset=offset)
            except DataError as error:
                if on_bad is None:
                    raise
                on_bad(error)
            else:
                if record is not None:
                    yield number, record
            offset += len(raw)


@contextmanager
def naming(path: StrPath) -> Iterator[None]:
    """Write the file's name into an error of the file system that lacks it, as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def open_atomic(path: StrPath, *, follow_links: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that appears under its name only when complete.

    The bytes go to a temporary file in the same folder (which is made if need be); it reaches the
    disk and then takes the name in one step. After an error the old file is still there, whole,
    and nothing else is left.

    Args:
        path: The file.
        follow_links: A symbolic link stays, and the file it points to is replaced; False replaces
            the link.
    """
    target = Path(os.path.realpath(path)) if follow_links else Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    try:
        # Exclusive creation by `open`, not `tempfile`: that makes files only the owner may read.
        with naming(target), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def sync_folder(folder: Path) -> None:
    """Bring a new name to the disk: without it, a loss of power may bring the old file back."""
    with suppress(OSError):  # some network file systems cannot; the file is there all the same
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text_atomic(path: StrPath, text: str) -> None:
    """Write text as UTF-8, wholly or not at all, with line ends as they are in ``text``."""
    data = text.encode("utf-8")
    with open_atomic(path) as file:
        file.write(data)


def write_json_atomic(path: StrPath, value: Any, *, indent: int | None = 2) -> None:
    """Write a value as JSON, wholly or not at all.

    Numbers that are not finite are written as ``NaN`` and ``Infinity``, as Python reads them back.

    Raises:
        TypeError: The value holds something that JSON cannot; the file is left as it was.
    """
    data = _encode(value, indent=indent)
    with open_atomic(path) as file:
        file.write(data)


def finite(value: Any) -> Any:
    """Return the value with None in the place of NaN and infinities, at any depth."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_jsonl(records: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of JSON for each record; NaN and infinities are written as null."""
    lines = [json.dumps(finite(record), ensure_ascii=False) for record in records]
    return "".join(f"{line}\n" for line in lines)


def append_jsonl(path: StrPath, record: Mapping[str, Any]) -> None:
    """Append one record to a JSONL file; see `JsonlWriter` for many."""
    with JsonlWriter(path) as writer:
        writer.write(record)


def set_aside(path: Path) -> Path | None:
    """Keep a file under another name: ``name.ext`` becomes ``name.1.ext``, or the next free number.

    Returns:
        The other name; None if there is no such file.
    """
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target


class JsonlWriter:
    """Write records to a JSONL file, each at once and whole.

    A line is with the operating system when `write` returns, so a run that is killed loses none.
    If the file's last line lacks its end, as a full disk may leave it, the end is written first:
    what is appended then does not stick to it.

    Args:
        path: The file; its folder is made if need be.
        append: Add to what is there; False starts the file anew.
    """

    def __init__(self, path: StrPath, *, append: bool = True) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab" if append else "wb")  # noqa: SIM115 (closed by `close`)
        if self._file.tell() > 0 and not _ends_with_newline(self.path):
            self._file.write(b"\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record and flush it.

        Raises:
            TypeError: The record holds something that JSON cannot; nothing is written.
        """
        data = _encode(record) + b"\n"
        with naming(self.path):
            self._file.write(data)
            self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        with naming(self.path):
            self._file.close()

    def __enter__(self) -> "JsonlWriter":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def parse_record(raw: bytes, path: StrPath, number: int, *, offset: int) -> dict[str, Any] | None:
    """Return the object of one line of a JSONL file, or None for a blank one.

    Args:
        raw: The line.
        path: The file, for messages.
        number: Of the line, from 1.
        offset: Where the line begins in the file, in bytes.

    Raises:
        DataError: It is not UTF-8, not JSON or not an object.
    """
    # Without its end, or an error at the end would be said to lie on the next line.
    text = decode(raw, path, first_line=number, offset=offset).rstrip()
    if not text:
        return None
    record = _parse(text, path, first_line=number)
    if not isinstance(record, dict):
        message = (
            f"holds a JSON {_json_type(record)}, but each line must hold one object `{{...}}`."
        )
        raise DataError(message, path=path, line=number)
    return record


def decode(raw: bytes, path: StrPath, *, first_line: int = 1, offset: int = 0) -> str:
    """Decode a stretch of a UTF-8 file, without a byte-order mark at the file's head.

    Args:
        raw: The stretch.
        path: The file, for messages.
        first_line: Number of the line that the stretch begins with.
        offset: Its place in the file, in bytes.

    Raises:
        DataError: A byte is not UTF-8; names file, line and byte position.
    """
    head = len(_BOM) if offset == 0 and raw.startswith(_BOM) else 0
    try:
        return raw[head:].decode("utf-8")
    except UnicodeDecodeError as error:
        position = head + error.start
        message = (
            f"is not UTF-8: byte 0x{raw[position]:02x} at byte position {offset + position}. "
            f"Save the file as UTF-8, for example with `iconv -f GB18030 -t UTF-8`."
        )
        line = first_line + raw.count(b"\n", 0, position)
        raise DataError(message, path=path, line=line) from error


def _parse(text: str, path: StrPath, *, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        message = f"is not valid JSON: {error.msg}. Mend or remove it."
        line = first_line + error.lineno - 1
        raise DataError(message, path=path, line=line, column=error.colno) from error
    except RecursionError as error:
        message = "is not usable JSON: its brackets are nested too deeply. Mend or remove it."
        raise DataError(message, path=path, line=first_line) from error
    except ValueError as error:  # Python's bound on the digits of a number
        message = (
            "is not usable JSON: a whole number in it has more than "
            f"{sys.get_int_max_str_digits()} digits. Mend or remove it."
        )
        raise DataError(message, path=path, line=first_line) from error


def _encode(value: Any, *, indent: int | None = None) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, indent=indent).encode("utf-8")
    except UnicodeEncodeError:
        # Half of a surrogate pair has no UTF-8; written as an escape it survives the round trip.
        return json.dumps(value, indent=indent).encode("ascii")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


_SVG_ID = re.compile(r'(?P<before>\bid="|\bhref="#|\burl\(#)(?P<name>[^")]+)')


def own_ids(svg: str, key: str) -> str:
    """Return an SVG whose names begin with its own key, so that a page may hold several.

    Args:
        svg: Whose names no other element of itself has.
        key: Unique in the page.
    """
    return _SVG_ID.sub(rf"\g<before>{key}-\g<name>", svg)
