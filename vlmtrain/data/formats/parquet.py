"""Reads conversations from parquet: the columns of a row are the keys of a record.

Images may stand in the file itself, as `datasets` writes them ({"bytes": ..., "path": ...} or
plain bytes). Rows are read by whole row groups, so that training from large files with images
inside is slow: `vlmtrain data build` turns them into shards.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmtrain.data.errors import DataError
from vlmtrain.data.formats.json_source import Record
from vlmtrain.data.formats.record import parse_record
from vlmtrain.data.sample import Sample

if TYPE_CHECKING:
    from vlmtrain.data.processor import Measure

_GROUPS = 2  # row groups kept


class ParquetSource:
    """A parquet file; same interface as `JsonSource`. A record's bytes are its row as JSON, with a
    hash in place of bytes."""

    def __init__(
        self,
        path: str | Path,
        media_root: str | Path | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        self.path, self.ignored = str(path), ignored
        self.media_root = Path(media_root) if media_root is not None else Path(path).parent
        self._file: Any = None
        self._groups: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def records(self) -> Iterator[Record]:
        """Every row in order.

        Raises:
            DataError: pyarrow is not installed, or no readable parquet file.
        """
        count = self._open().metadata.num_rows
        if not count:
            raise DataError(f"{self.path}: the file is empty; it must hold at least one sample")
        for number in range(count):
            yield self.read(number, number, 0)

    def read(self, number: int, offset: int, size: int) -> Record:
        """One row again; its number stands for its place in the file."""
        row = self._row(number)
        data = json.dumps(row, default=_digest, ensure_ascii=False, sort_keys=True)
        return Record(number, number, data.encode())

    def measured(self, record: Record, fingerprint: str) -> Measure | None:
        return None

    def parse(self, record: Record) -> Sample:
        """The sample of one row. Raises DataError as `parse_record`."""
        row = self._row(record.number)
        return parse_record(row, self.path, record.number, self.media_root, ignored=self.ignored)

    def _open(self) -> Any:
        if self._file is None:
            try:
                import pyarrow
                import pyarrow.parquet
            except ImportError:
                raise DataError(
                    f"{self.path}: parquet files need pyarrow: pip install pyarrow"
                ) from None
            try:
                self._file = pyarrow.parquet.ParquetFile(self.path)
            except FileNotFoundError:
                raise DataError(f"{self.path}: no such file") from None
            except (OSError, pyarrow.ArrowException) as error:
                raise DataError(f"{self.path}: no readable parquet file: {error}") from None
            metadata = self._file.metadata
            self._first = [0]
            for group in range(metadata.num_row_groups):
                self._first.append(self._first[-1] + metadata.row_group(group).num_rows)
        return self._file

    def _row(self, number: int) -> dict[str, Any]:
        with self._lock:
            file = self._open()
            group = next(g for g, end in enumerate(self._first[1:]) if number < end)
            if group not in self._groups:
                try:
                    rows = [_given(row) for row in file.read_row_group(group).to_pylist()]
                except Exception as error:  # pyarrow's errors share no base with a name
                    raise DataError(
                        f"{self.path}: row group {group} cannot be read: {error}"
                    ) from None
                self._groups[group] = rows
                while len(self._groups) > _GROUPS:
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            return self._groups[group][number - self._first[group]]


def _given(value: Any) -> Any:
    """A row without the keys it has not: a column's structs have the keys of all its rows."""
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return [_given(item) for item in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    """Bytes by their hash; anything else (a date) by its text."""
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)
