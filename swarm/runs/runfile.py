"""Reads `run.toml`, the file from which an owner creates a run.

```toml
name = "my-lm"
preset = "wan"                    # how far apart the peers are: local, lan or wan
imports = ["my_experts"]          # modules of yours that register expert classes

[[experts]]
grid = "ffn.[0:4].[0:4]"          # 16 experts, ffn.0.0 to ffn.3.3
module = "ffn"                    # a registered expert class
config = { hid = 256 }            # arguments of its constructor
replicas = 2                      # hosts that hold each expert
optimizer = { name = "adamw", lr = 1e-3, clip_norm = 1.0, schedule = "cosine", total_steps = 50000 }
```
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.config import PresetName
from swarm.errors import ConfigError, SwarmError
from swarm.experts.spec import OPTIMIZER_SETTINGS, ExpertGrid
from swarm.runs.manifest import MAX_GRIDS, check_run_name

MAX_RUN_FILE_BYTES = 1024 * 1024


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Optimizer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str


class _Grid(_Table):
    grid: str
    module: str
    config: dict[str, Any] = {}
    replicas: int = Field(2, ge=1)
    optimizer: _Optimizer | None = None


class _File(_Table):
    name: str
    preset: PresetName = "wan"
    imports: list[str] = []
    experts: list[_Grid] = Field([], max_length=MAX_GRIDS)


@dataclass(frozen=True, slots=True)
class RunFile:
    """What a `run.toml` says.

    Attributes:
        name: What people call the run.
        preset: The configuration preset of the first peer.
        imports: Modules to import before the experts are looked up.
        experts: The grids.
    """

    name: str
    preset: PresetName
    imports: tuple[str, ...]
    experts: tuple[ExpertGrid, ...]

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """Read and check a file.

        Raises:
            ConfigError: The file cannot be read, is not TOML, or a field cannot be used; the message names both.
        """
        try:
            if path.stat().st_size > MAX_RUN_FILE_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_RUN_FILE_BYTES} bytes.", fix="Name a run.toml.")
            values = tomllib.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            raise ConfigError(
                f"There is no file {path}.", fix="Name a run.toml; `swarm create --help` shows one."
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}.", fix="Correct the named line.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}", fix="Name a run.toml that you may read.") from error
        try:
            parsed = _File.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{_field(e['loc'])}: {e['msg']}" for e in error.errors()[:5])
            raise ConfigError(f"{path} cannot be used: {problems}.", fix="Correct the named fields.") from error
        try:
            check_run_name(parsed.name)
        except ConfigError as error:
            raise ConfigError(f"{path}: name: {error.message}", fix=error.fix) from error
        grids = tuple(_grid(path, index, table) for index, table in enumerate(parsed.experts))
        names = [grid.name for grid in grids]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"{path}: experts[{index}].grid: {name!r} is there twice.", fix="Rename one of them.")
        return cls(parsed.name, parsed.preset, tuple(parsed.imports), grids)


def _grid(path: Path, index: int, table: _Grid) -> ExpertGrid:
    values: dict[str, Any] = {
        "pattern": table.grid,
        "module": table.module,
        "config": table.config,
        "replicas": table.replicas,
    }
    if table.optimizer is not None:
        given = table.optimizer.model_extra or {}
        values["optimizer"] = {
            "name": table.optimizer.name,
            **{key: value for key, value in given.items() if key in OPTIMIZER_SETTINGS},
            "arguments": {key: value for key, value in given.items() if key not in OPTIMIZER_SETTINGS},
        }
    try:
        return ExpertGrid.from_dict(values)
    except (SwarmError, ValueError, TypeError) as error:
        message = error.message if isinstance(error, SwarmError) else str(error)
        fix = error.fix if isinstance(error, SwarmError) else "Correct the named table."
        raise ConfigError(f"{path}: experts[{index}]: {message}", fix=fix) from error


def _field(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
