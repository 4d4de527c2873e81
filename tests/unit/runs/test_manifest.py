"""The signed manifest: canonical, bounded, checked; later fields are kept, later formats refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import (
    BadSignatureError,
    ConfigError,
    FrameTooLargeError,
    MalformedFrameError,
    ProtocolVersionError,
    SwarmError,
    WrongRunError,
)
from swarm.experts.spec import ExpertGrid, OptimizerSpec
from swarm.identity import KeyPair
from swarm.net.transport import PROTOCOL_VERSION
from swarm.runs.manifest import MAX_MANIFEST_BYTES, Manifest, newest, sign_json

KEY = KeyPair.from_private_bytes(b"\x01" * 32)
OTHER = KeyPair.from_private_bytes(b"\x02" * 32)
GRIDS = (
    ExpertGrid("ffn.[0:4].[0:4]", "ffn", config={"hid": 256}, optimizer=OptimizerSpec("adamw", lr=1e-3, clip_norm=1.0)),
    ExpertGrid("head", "nop", replicas=3),
)
MANIFEST = Manifest("my-lm", KEY.public_key, GRIDS, manifest_version=3)
SIGNED = MANIFEST.sign(KEY)
VALUES = json.loads(SIGNED.split(b"\n")[0])


def document(values: Any, key: KeyPair = KEY) -> bytes:
    text = values if isinstance(values, bytes) else json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    return sign_json(text, key)


def test_a_manifest_survives_its_bytes() -> None:
    read = Manifest.verify(SIGNED, MANIFEST.run_id)
    assert read == MANIFEST
    assert list(read.grids) == ["ffn", "head"]
    assert read.grids["ffn"].optimizer.clip_norm == 1.0
    assert read.sign(KEY) == SIGNED
    assert read.unknown_fields == ()


def test_the_bytes_are_canonical() -> None:
    text = SIGNED.split(b"\n")[0]
    assert text == json.dumps(VALUES, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    assert VALUES["protocol_version"] == PROTOCOL_VERSION
    assert VALUES["manifest_version"] == 3


def test_a_manifest_signed_by_another_key() -> None:
    with pytest.raises(BadSignatureError, match="altered"):
        Manifest.verify(document(VALUES, OTHER), MANIFEST.run_id)


def test_a_manifest_of_another_run() -> None:
    other = Manifest("my-lm", OTHER.public_key, GRIDS)
    with pytest.raises(WrongRunError):
        Manifest.verify(other.sign(OTHER), MANIFEST.run_id)
    with pytest.raises(ConfigError, match="another run key"):
        other.sign(KEY)


@given(st.integers(0, len(SIGNED) - 1), st.integers(1, 255))
def test_any_altered_byte_is_refused(position: int, change: int) -> None:
    altered = bytearray(SIGNED)
    altered[position] ^= change
    with pytest.raises(SwarmError):
        Manifest.verify(bytes(altered), MANIFEST.run_id)


@given(st.integers(0, len(SIGNED) - 1))
def test_a_truncated_manifest_is_malformed(length: int) -> None:
    with pytest.raises(MalformedFrameError):
        Manifest.verify(SIGNED[:length], MANIFEST.run_id)


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedFrameError):
        Manifest.verify(data, MANIFEST.run_id)


def test_an_oversized_manifest_is_refused_unread() -> None:
    with pytest.raises(FrameTooLargeError):
        Manifest.verify(b"x" * (MAX_MANIFEST_BYTES + 1), MANIFEST.run_id)
    big = ExpertGrid("ffn.[0:4]", "ffn", config={"text": "x" * MAX_MANIFEST_BYTES})
    with pytest.raises(ConfigError, match="more than"):
        Manifest("big", KEY.public_key, (big,)).sign(KEY)


@pytest.mark.parametrize(
    "values",
    [
        b"[]",
        b"nonsense",
        b"[" * 200_000,
        json.dumps(VALUES).encode(),
        json.dumps(VALUES, sort_keys=True, separators=(",", ":"))
        .encode()
        .replace(b'"format":1', b'"format":1,"format":1'),
        {**VALUES, "format": "1"},
        {**VALUES, "format": 0},
        {**VALUES, "format": True},
        {**VALUES, "manifest_version": 0},
        {**VALUES, "manifest_version": 1.5},
        {**VALUES, "manifest_version": 2**70},
        {**VALUES, "name": ""},
        {**VALUES, "name": 7},
        {**VALUES, "name": "../etc"},
        {**VALUES, "experts": {}},
        {**VALUES, "experts": [7]},
        {**VALUES, "experts": [{}]},
        {**VALUES, "experts": [{"pattern": "ffn.[0:4]", "module": 7}]},
        {**VALUES, "experts": VALUES["experts"] * 2},
        {**VALUES, "experts": [{}] * 300},
        {**VALUES, "run_public_key": "abc"},
        {k: v for k, v in VALUES.items() if k != "name"},
    ],
)
def test_what_the_owner_must_not_sign_is_malformed(values: Any) -> None:
    with pytest.raises(MalformedFrameError):
        Manifest.verify(document(values), MANIFEST.run_id)


def test_later_fields_are_let_through_and_named() -> None:
    signed = document({**VALUES, "quota": {"upload": 1}, "allies": []})
    read = Manifest.verify(signed, MANIFEST.run_id)
    assert read.unknown_fields == ("allies", "quota")
    assert read.name == "my-lm"


@pytest.mark.parametrize("change", [{"format": 2}, {"protocol_version": PROTOCOL_VERSION + 1}])
def test_a_later_format_or_protocol_names_the_upgrade(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolVersionError) as caught:
        Manifest.verify(document({**VALUES, **change}), MANIFEST.run_id)
    assert "pip install --upgrade swarm-train" in str(caught.value)


def test_the_expert_classes_need_not_be_installed_to_read_a_manifest() -> None:
    manifest = Manifest("m", KEY.public_key, (ExpertGrid("x.[0:2]", "somebody_elses_class"),))
    assert Manifest.verify(manifest.sign(KEY), manifest.run_id).experts[0].module == "somebody_elses_class"


@pytest.mark.parametrize("name", ["a", "my-lm 2.0_b", "x" * 64])
def test_names_of_runs(name: str) -> None:
    assert Manifest(name, KEY.public_key).name == name


@pytest.mark.parametrize("name", ["", " a", "a ", "x" * 65, "a/b", "a\nb", "é", "-a"])
def test_what_cannot_name_a_run(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a run"):
        Manifest(name, KEY.public_key)


def test_two_grids_of_one_name() -> None:
    with pytest.raises(ConfigError, match="'ffn'"):
        Manifest("m", KEY.public_key, (ExpertGrid("ffn.[0:2]", "ffn"), ExpertGrid("ffn.[0:3]", "ffn")))


def test_the_newest_manifest_holds() -> None:
    older, newer = Manifest("m", KEY.public_key, (), 2), Manifest("m", KEY.public_key, (), 7)
    assert newest([older, newer]) is newer
    assert newest([newer, older]) is newer
