"""The committed protobuf code is what proto/ generates, at the floor that pyproject.toml promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto" / "swarm" / "pb").glob("*.proto"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    command = [sys.executable, str(ROOT / "proto" / "generate.py"), "--check", str(out)]
    subprocess.run(command, check=True, timeout=50)
    return out / "swarm" / "pb"


def test_the_committed_files_are_the_generated_ones(fresh: Path) -> None:
    committed = {p.name: p.read_text("utf-8") for p in (ROOT / "swarm" / "pb").glob("*_pb2.py*")}
    generated = {p.name: p.read_text("utf-8") for p in fresh.glob("*_pb2.py*")}
    assert sorted(committed) == sorted(generated)
    for name, text in generated.items():
        assert committed[name] == text, f"{name} is outdated: run python proto/generate.py"


def test_the_generator_is_no_newer_than_the_promised_runtime() -> None:
    """protobuf refuses code that a newer generator wrote than the runtime that loads it."""
    floor = re.search(r'"protobuf>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert floor is not None
    versions = set()
    for path in (ROOT / "swarm" / "pb").glob("*_pb2.py"):
        found = re.search(r"# Protobuf Python Version: ([0-9.]+)", path.read_text("utf-8"))
        assert found is not None, path
        versions.add(found[1])
    promised = [int(part) for part in floor[1].split(".")]
    assert versions
    for version in versions:
        assert [int(part) for part in version.split(".")][: len(promised)] <= promised


@pytest.mark.parametrize("path", PROTOS, ids=lambda p: p.name)
def test_every_proto_is_in_the_package_and_explains_itself(path: Path) -> None:
    text = path.read_text("utf-8")
    assert 'syntax = "proto3";' in text
    assert "package swarm.pb;" in text
    assert text.startswith("//")
