"""Checkpoints: atomic, pruned, verified, with the older one to fall back on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from swarm.clock import SystemClock
from swarm.errors import CorruptStateError, StateError, UnsupportedDtypeError
from swarm.events import EventStream
from swarm.state.checkpoint import CheckpointCorrupt, load_checkpoint, save_checkpoint
from swarm.tensors.schema import DTYPES

TENSORS = {"w": torch.arange(6.0).view(2, 3), "step": torch.tensor(4), "a": torch.ones(2).bfloat16()}


def files(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "new" / "dir", TENSORS, {"epoch": 3, "data": {"position": [1, 2]}})
    loaded = load_checkpoint(tmp_path / "new" / "dir")
    assert loaded is not None
    assert loaded.path == saved
    assert loaded.metadata == {"epoch": 3, "data": {"position": [1, 2]}}
    assert list(loaded.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)
    loaded.tensors["w"].zero_()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_every_dtype(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape).to(DTYPES[name])
    save_checkpoint(tmp_path, {"x": tensor}, {})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.tensors["x"].dtype == tensor.dtype
    assert loaded.tensors["x"].shape == tensor.shape


def test_shared_memory_layouts_and_graphs(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    save_checkpoint(tmp_path, {"a": weight, "tied": weight, "t": weight.t(), "row": weight[1]}, {})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert torch.equal(loaded.tensors["tied"], weight.detach())
    assert torch.equal(loaded.tensors["t"], weight.detach().t())
    assert torch.equal(loaded.tensors["row"], weight.detach()[1])
    assert not loaded.tensors["a"].requires_grad


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    assert load_checkpoint(tmp_path / "missing") is None
    (tmp_path / "notes.json").write_text("{}")
    assert load_checkpoint(tmp_path) is None


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(5):
        save_checkpoint(tmp_path, {"s": torch.tensor(step)}, {"step": step}, keep=2)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.metadata == {"step": 4}
    assert files(tmp_path) == [
        "checkpoint-00000004.json",
        "checkpoint-00000004.safetensors",
        "checkpoint-00000005.json",
        "checkpoint-00000005.safetensors",
    ]
    save_checkpoint(tmp_path, {}, {}, keep=1)
    assert len(files(tmp_path)) == 2


def test_other_files_are_left_alone_and_remains_of_a_crash_removed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-00000009.safetensors").write_bytes(b"no JSON was written")
    (tmp_path / "checkpoint-00000010.json.part").write_bytes(b"{")
    save_checkpoint(tmp_path, TENSORS, {})
    assert files(tmp_path) == ["checkpoint-00000001.json", "checkpoint-00000001.safetensors", "notes.txt"]


DAMAGE = {
    "a flipped byte": lambda p: p.with_suffix(".safetensors").write_bytes(
        b"\0" + p.with_suffix(".safetensors").read_bytes()[1:]
    ),
    "a flipped bit of a weight": lambda p: p.with_suffix(".safetensors").write_bytes(
        p.with_suffix(".safetensors").read_bytes()[:-1] + b"\x55"
    ),
    "a cut file": lambda p: os.truncate(p.with_suffix(".safetensors"), 20),
    "a missing file": lambda p: p.with_suffix(".safetensors").unlink(),
    "an empty JSON": lambda p: p.write_bytes(b""),
    "another JSON": lambda p: p.write_bytes(b"[]"),
    "JSON without fields": lambda p: p.write_bytes(b'{"format": 1}'),
    "JSON of another format": lambda p: p.write_bytes(p.read_bytes().replace(b'"format": 1', b'"format": 2')),
    "binary JSON": lambda p: p.write_bytes(b"\xff\xfe\0"),
    "a name that is not there": lambda p: p.write_bytes(p.read_bytes().replace(b'"w"', b'"x"')),
    "metadata that is no object": lambda p: p.write_text(json.dumps({**json.loads(p.read_text()), "metadata": 3})),
    "raw fields of the wrong type": lambda p: p.write_text(json.dumps({**json.loads(p.read_text()), "raw": [3]})),
    "an unknown dtype": lambda p: p.write_text(json.dumps({**json.loads(p.read_text()), "raw": {"w": ["f", [6]]}})),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, case: str) -> None:
    events = EventStream(SystemClock())
    first = save_checkpoint(tmp_path, TENSORS, {"step": 1})
    second = save_checkpoint(tmp_path, TENSORS, {"step": 2})
    DAMAGE[case](second)
    loaded = load_checkpoint(tmp_path, events)
    assert loaded is not None
    assert loaded.metadata == {"step": 1}
    [stamped] = events.recent(CheckpointCorrupt)
    assert stamped.event.path == str(second)  # type: ignore[attr-defined]
    assert stamped.event.reason  # type: ignore[attr-defined]

    DAMAGE[case](first)
    with pytest.raises(CorruptStateError, match=r"checkpoint-00000002\.json.*checkpoint-00000001\.json"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("failing", ["checkpoint-00000002.safetensors", "checkpoint-00000002.json"])
def test_a_crash_while_writing_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save_checkpoint(tmp_path, TENSORS, {"step": 1})
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        if Path(target).name == failing:
            raise OSError("No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(StateError, match="No space left"):
            save_checkpoint(tmp_path, TENSORS, {"step": 2})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.metadata == {"step": 1}
    save_checkpoint(tmp_path, TENSORS, {"step": 3})
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.metadata == {"step": 3}
    assert not [name for name in files(tmp_path) if name.endswith(".part")]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedDtypeError):
        save_checkpoint(tmp_path, {"x": torch.ones(2, 2).to_sparse()}, {})
    with pytest.raises(UnsupportedDtypeError):
        save_checkpoint(tmp_path, {"x": torch.empty(2, device="meta")}, {})
    with pytest.raises(ValueError, match="JSON"):
        save_checkpoint(tmp_path, {}, {"x": object()})
    with pytest.raises(ValueError, match="keep"):
        save_checkpoint(tmp_path, {}, {}, keep=0)
    assert files(tmp_path) == []
