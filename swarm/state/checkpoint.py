"""Checkpoints on disk: safetensors with a JSON file beside it, written atomically, verified when loaded.

`NAME.safetensors` is written first; `NAME.json`, which holds its hash and the metadata, makes it count. A crash at any
moment therefore leaves the checkpoints before it intact. One process writes to a directory at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from swarm.errors import CorruptStateError, StateError, SwarmError, UnsupportedDtypeError
from swarm.events import Event, EventStream
from swarm.state.snapshot import encode_metadata
from swarm.tensors.codecs import host_flat
from swarm.tensors.schema import dtype_name, parse_dtype

FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{8,12})\.json")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
_STORABLE = frozenset((*_FLOATS, "bool", "uint8", "int8", "int16", "int32", "int64"))
"""What every supported release of safetensors stores; other dtypes are stored as bytes."""
_HASH_BLOCK_BYTES = 1 << 20


_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    CorruptStateError,
    UnsupportedDtypeError,
)
"""What reading damaged or foreign files raises."""


@dataclass(frozen=True, slots=True)
class CheckpointCorrupt(Event):
    """A checkpoint could not be used; an older one was tried."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint in memory."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    path: Path
    """Its JSON file."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint says of itself; its tensors were not read."""

    number: int
    path: Path
    """Its JSON file."""
    nbytes: int
    metadata: dict[str, Any]


def save_checkpoint(path_dir: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint and remove all but the newest `keep`.

    Args:
        path_dir: Directory; created where missing.
        tensors: By name; any dense layout and device. Tensors may share memory; the copies on disk do not.
        metadata: Values that JSON can carry.
        keep: Checkpoints to leave, this one included.

    Returns:
        The JSON file of the new checkpoint.

    Raises:
        UnsupportedDtypeError: A tensor is not dense, or of a dtype that swarm does not know.
        ValueError: Metadata that JSON cannot carry, or `keep` below 1.
        StateError: The disk refused; nothing of the checkpoints before is lost.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}.")
    metadata_json = encode_metadata(metadata)
    flat, raw = _storable(tensors)
    data = save(flat)
    try:
        path_dir.mkdir(parents=True, exist_ok=True)
        number = max((n for n, _ in _listed(path_dir)), default=0) + 1
        stem = f"checkpoint-{number:08d}"
        description = {
            "format": FORMAT,
            "sha256": hashlib.sha256(data).hexdigest(),
            "nbytes": len(data),
            "names": list(flat),
            "raw": raw,
            "metadata": json.loads(metadata_json),
        }
        _write(path_dir / f"{stem}.safetensors", data)
        path = path_dir / f"{stem}.json"
        _write(path, json.dumps(description, indent=1).encode())
        _prune(path_dir, keep)
    except OSError as error:
        raise StateError(
            f"The checkpoint in {path_dir} could not be written: {error}.", fix="Free disk space or check permissions."
        ) from error
    return path


def load_checkpoint(path_dir: Path, events: EventStream | None = None) -> Checkpoint | None:
    """The newest checkpoint whose files are intact, or none if the directory has never held one.

    Args:
        path_dir: Where `save_checkpoint` wrote.
        events: Receives a `CheckpointCorrupt` for every checkpoint passed over.

    Raises:
        CorruptStateError: There are checkpoints, and all are damaged.
    """
    problems: list[str] = []
    for _, path in sorted(_listed(path_dir), reverse=True):
        try:
            return _load(path)
        except _DAMAGE as error:
            reason = error.message if isinstance(error, SwarmError) else f"{type(error).__name__}: {error}"
            problems.append(f"{path.name}: {reason}")
            if events is not None:
                events.emit(CheckpointCorrupt(path=str(path), reason=reason[:300]))
    if problems:
        raise CorruptStateError(
            f"No checkpoint in {path_dir} can be used: {'; '.join(problems)}",
            fix="Restore the directory from a backup, or move it away to start without it.",
        )
    return None


def list_checkpoints(path_dir: Path) -> list[CheckpointInfo]:
    """The checkpoints of a directory, newest first, without reading their tensors; what cannot be read is left out."""
    found = []
    for number, path in sorted(_listed(path_dir), reverse=True):
        try:
            description = _description(path)
            nbytes = path.with_suffix(".safetensors").stat().st_size
        except _DAMAGE:
            continue
        found.append(CheckpointInfo(number, path, nbytes, description["metadata"]))
    return found


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, given its JSON file. Raises `StateError`."""
    try:
        path.unlink(missing_ok=True)
        path.with_suffix(".safetensors").unlink(missing_ok=True)
    except OSError as error:
        raise StateError(f"The checkpoint {path} could not be removed: {error}.", fix="Check permissions.") from error


def _storable(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors that safetensors accepts: contiguous, on the CPU, nothing shared; and what is stored as bytes."""
    flat: dict[str, Tensor] = {}
    raw: dict[str, Any] = {}
    spans: list[tuple[int, int]] = []  # memory that is taken, ascending and disjoint
    for name, tensor in tensors.items():
        kind = dtype_name(tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedDtypeError(f"{name!r} is no dense tensor that holds data.")
        elements = host_flat(tensor)
        span = (elements.data_ptr(), elements.data_ptr() + elements.nbytes)
        place = bisect(spans, span)
        if any(a < span[1] and span[0] < b for a, b in spans[max(0, place - 1) : place + 1]):
            elements = elements.clone()
        elif elements.numel():
            spans.insert(place, span)
        if kind in _STORABLE:
            flat[name] = elements.view(tensor.shape)
        else:
            flat[name] = elements.view(torch.uint8)
            raw[name] = [kind, list(tensor.shape)]
    return flat, raw


def _description(path: Path) -> dict[str, Any]:
    description = json.loads(path.read_text("utf-8"))
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CorruptStateError("the JSON is not a checkpoint of a format known here")
    if not isinstance(description["metadata"], dict):
        raise CorruptStateError("the metadata is not a JSON object")
    return description


def _load(path: Path) -> Checkpoint:
    description = _description(path)
    weights = path.with_suffix(".safetensors")
    digest, nbytes = hashlib.sha256(), 0
    with weights.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
            nbytes += len(block)
    if nbytes != description["nbytes"]:
        raise CorruptStateError(f"{weights.name} has {nbytes} bytes instead of {description['nbytes']}")
    if digest.hexdigest() != description["sha256"]:
        raise CorruptStateError(f"{weights.name} does not match its hash")
    tensors = load_file(weights)
    for name, (dtype, shape) in description["raw"].items():
        tensors[name] = tensors[name].view(parse_dtype(dtype)).view(shape)
    return Checkpoint({name: tensors[name] for name in description["names"]}, description["metadata"], path)


def _listed(path_dir: Path) -> list[tuple[int, Path]]:
    """Number and JSON file of every checkpoint."""
    if not path_dir.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in path_dir.iterdir())
    return [(int(match[1]), path) for match, path in matches if match]


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is either there with all its content or not at all, also after a power cut."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    if os.name == "posix":  # elsewhere directories cannot be synced
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _prune(path_dir: Path, keep: int) -> None:
    """Remove old checkpoints, JSON first, and what crashed writers left."""
    kept = sorted(_listed(path_dir), reverse=True)
    for _, path in kept[keep:]:
        path.unlink(missing_ok=True)
    stems = {path.stem for _, path in kept[:keep]}
    for path in sorted(path_dir.glob("checkpoint-*")):
        if path.suffix == ".part" or (path.suffix == ".safetensors" and path.stem not in stems):
            path.unlink(missing_ok=True)
