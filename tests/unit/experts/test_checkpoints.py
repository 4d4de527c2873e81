"""Experts on disk: names, damage, room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarm.clock import SystemClock
from swarm.errors import MalformedFrameError, StateError
from swarm.events import EventStream
from swarm.experts.checkpoints import ExpertCheckpoints, folder_name
from swarm.state.checkpoint import CheckpointCorrupt
from swarm.state.snapshot import Snapshot

RUN = bytes(range(32))


def snapshot(uid: str, version: int, numel: int = 64) -> Snapshot:
    tensors = {"model.w": torch.full((numel,), float(version)), "optimizer.0.step": torch.tensor(float(version))}
    return Snapshot.build(tensors, {"uid": uid, "weight_version": version, "scalars": {}})


def opened(path: Path, kept: int = 2, max_bytes: int = 1 << 30) -> ExpertCheckpoints:
    events = EventStream(SystemClock())
    made = ExpertCheckpoints(path, RUN, kept, max_bytes, events)
    made.scan()
    return made


def files(path: Path, uid: str) -> list[Path]:
    return sorted((path / "experts" / RUN.hex()[:16] / folder_name(uid)).glob("*.safetensors"))


def test_folder_names_are_safe_and_differ_where_case_is_ignored() -> None:
    uids = ["ffn.0.1", "FFN.0.1", "Ffn.0.1", "fFn.0.1", "con", "Con", "con.0", "nul.3", "com1.0", "console.0", "a-b_c"]
    names = [folder_name(uid) for uid in uids]
    assert len({name.lower() for name in names}) == len(uids)
    assert names[0] == "ffn.0.1"
    assert not any(name.split(".")[0].lower() in ("con", "nul", "com1") for name in names)
    for bad in ("../x", "a/b", "", ".."):
        with pytest.raises(MalformedFrameError):
            folder_name(bad)


def test_the_newest_is_loaded_also_by_another_process_and_few_are_kept(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    assert checkpoints.versions == {}
    assert checkpoints.load("ffn.0") is None
    for version in (1, 5, 9):
        checkpoints.save(snapshot("ffn.0", version), {"ffn.0"})
    checkpoints.save(snapshot("ffn.1", 2), {"ffn.0"})
    assert len(files(tmp_path, "ffn.0")) == 2
    again = opened(tmp_path)
    assert again.versions == checkpoints.versions == {"ffn.0": 9, "ffn.1": 2}
    loaded = again.load("ffn.0")
    assert loaded is not None
    assert loaded.metadata["weight_version"] == 9
    assert loaded.tensors["model.w"].tolist() == [9.0] * 64
    assert loaded.id == snapshot("ffn.0", 9).id
    assert opened(tmp_path).nbytes == checkpoints.nbytes > 0
    other_run = ExpertCheckpoints(tmp_path, bytes(32), 2, 1 << 30, EventStream(SystemClock()))
    other_run.scan()
    assert other_run.versions == {}


@pytest.mark.parametrize("harm", ["flip", "cut", "gone", "json"])
def test_a_damaged_checkpoint_is_passed_over_with_an_event(tmp_path: Path, harm: str) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(snapshot("ffn.0", 4), ())
    checkpoints.save(snapshot("ffn.0", 7), ())
    newest = files(tmp_path, "ffn.0")[-1]
    if harm == "flip":
        data = bytearray(newest.read_bytes())
        data[-3] ^= 1
        newest.write_bytes(data)
    elif harm == "cut":
        newest.write_bytes(newest.read_bytes()[:-8])
    elif harm == "gone":
        newest.unlink()
    else:
        newest.with_suffix(".json").write_text("{")
    again = opened(tmp_path)
    loaded = again.load("ffn.0")
    assert loaded is not None
    assert loaded.metadata["weight_version"] == 4
    assert again.versions == {"ffn.0": 4}
    assert again._events.count(CheckpointCorrupt) == 1
    again.save(snapshot("ffn.0", 8), ())
    assert opened(tmp_path).versions == {"ffn.0": 8}


def test_when_all_are_damaged_there_is_nothing(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    checkpoints.save(snapshot("ffn.0", 4), ())
    files(tmp_path, "ffn.0")[0].write_bytes(b"x")
    again = opened(tmp_path)
    assert again.load("ffn.0") is None
    assert again.versions == {}


def test_room_is_made_from_older_ones_then_from_experts_not_held_never_from_held_ones(tmp_path: Path) -> None:
    size = snapshot("ffn.0", 1, 100_000).nbytes
    checkpoints = opened(tmp_path, max_bytes=4 * size)
    for uid in ("ffn.0", "ffn.1"):
        checkpoints.save(snapshot(uid, 1, 100_000), ())
    checkpoints.save(snapshot("ffn.1", 2, 100_000), ())
    held = {"ffn.1", "ffn.2", "ffn.3"}
    checkpoints.save(snapshot("ffn.2", 1, 100_000), held)
    assert checkpoints.versions == {"ffn.0": 1, "ffn.1": 2, "ffn.2": 1}
    assert len(files(tmp_path, "ffn.1")) == 1
    checkpoints.save(snapshot("ffn.3", 1, 100_000), held)
    assert checkpoints.versions == {"ffn.1": 2, "ffn.2": 1, "ffn.3": 1}
    with pytest.raises(StateError, match="does not fit"):
        checkpoints.save(snapshot("ffn.4", 1, 100_000), {*held, "ffn.4"})
    assert opened(tmp_path).versions == {"ffn.1": 2, "ffn.2": 1, "ffn.3": 1}
    assert checkpoints.nbytes <= 4 * size
