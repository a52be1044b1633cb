"""Results by key, in a file that is complete after every one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Store:
    """Records by key. What was recorded before is loaded, so that a run can be taken up again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.records = json.loads(path.read_text())

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def put(self, key: str, record: dict[str, Any]) -> None:
        self.records[key] = record
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(".new")
        # A line per record: to be read by people, and to differ where records differ.
        lines = [f"{json.dumps(k)}: {json.dumps(r)}" for k, r in sorted(self.records.items())]
        written.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        written.replace(self.path)

    def clear(self) -> None:
        """Forget everything, the file included."""
        self.path.unlink(missing_ok=True)
        self.records = {}

    def merge_into(self, path: Path) -> None:
        """Put all records into another file and forget them here."""
        other = Store(path)
        other.records |= self.records
        other.write()
        self.clear()
