"""What the processes of a local swarm and their parent tell each other: a configuration file and a status file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

CONFIG_FILE, STATUS_FILE, LOG_FILE, EVENTS_FILE, PID_FILE = (
    "config.json",
    "status.jsonl",
    "log.txt",
    "events.jsonl",
    "pid.json",
)
STOP_COMMAND = "stop"
"""The line on a child's standard input that asks it to leave. The end of its standard input means the same."""
STOP_GRACE_S = 8.0
"""A child that was asked to leave ends itself after this long, whatever it is doing."""

ProcessKind = Literal["bootstrap", "host", "trainer"]


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Everything a child process needs, JSON-able. It holds an invite, so the file is readable by its owner only.

    Attributes:
        directory: Where the child writes its status, log and events; `data` below it keeps its identity.
        invite: Admission to the run; empty for a bootstrap process, which creates the run.
        create: For a bootstrap process: `name`, `experts` (grids as dicts) and `roles` to issue invites for.
        train: `module:function`, called with the peer and `train_args`.
        overrides: Changes to the preset of `PeerConfig`.
        sys_path: The parent's module search path, so that the same modules can be imported.
    """

    name: str
    kind: ProcessKind
    directory: str
    invite: str = ""
    create: dict[str, Any] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    train: str = ""
    train_args: dict[str, Any] = field(default_factory=dict)
    preset: str = "local"
    overrides: dict[str, Any] = field(default_factory=dict)
    torch_threads: int = 1
    seed: int = 0
    sys_path: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def write(self) -> Path:
        """Store it in its directory and return the file's path."""
        file = self.path / CONFIG_FILE
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as stream:
            json.dump(asdict(self), stream)
        return file

    @classmethod
    def read(cls, file: Path) -> ProcessConfig:
        return cls(**json.loads(file.read_text("utf-8")))


def append_json(file: Path, record: dict[str, Any]) -> None:
    """Append one line. Appending needs no rename, which other readers would block on Windows."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record, default=str) + "\n")


def read_json_lines(file: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete lines from byte `offset` on, and the offset after them. A missing file has none.

    A line that is cut or garbled (its writer was killed half-way through it) is left out.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    records = []
    for line in data[:end].splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, offset + end
