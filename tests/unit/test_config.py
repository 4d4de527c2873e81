"""Settings: presets, profiles, and errors that name the field."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import swarm.config as config_module
from swarm.config import DhtConfig, PeerConfig
from swarm.errors import ConfigError

SECTIONS = [
    c
    for c in vars(config_module).values()
    if inspect.isclass(c)
    and issubclass(c, BaseModel)
    and c.__module__ == "swarm.config"
    and not c.__name__.startswith("_")
]


def test_the_default_is_the_internet() -> None:
    assert PeerConfig() == PeerConfig.preset("wan")


def test_presets_get_less_patient_the_nearer_the_peers_are() -> None:
    local, lan, wan = (PeerConfig.preset(name) for name in ("local", "lan", "wan"))
    for get in (
        lambda c: c.heartbeat_s,
        lambda c: c.deadline.cap_s,
        lambda c: c.client.deadline.initial_s,
        lambda c: c.dht.call_timeout_s,
        lambda c: c.averaging.matchmaking_s,
        lambda c: c.averaging.round_timeout_s,
    ):
        assert get(local) <= get(lan) <= get(wan)
    assert local.heartbeat_s < lan.heartbeat_s < wan.heartbeat_s
    assert local.transport.listen_host == "127.0.0.1"


def test_an_override_of_a_section_leaves_its_other_fields() -> None:
    config = PeerConfig.preset("local", dht={"replication": 2}, name="x")
    assert (config.dht.replication, config.name) == (2, "x")
    assert config.dht.call_timeout_s == PeerConfig.preset("local").dht.call_timeout_s


def test_a_section_object_changes_only_what_was_set_in_it() -> None:
    config = PeerConfig.preset("local", dht=DhtConfig(replication=2))
    assert config.dht.replication == 2
    assert config.dht.call_timeout_s == PeerConfig.preset("local").dht.call_timeout_s


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"dht": {"nonsense": 1}}, "dht.nonsense"),
        ({"transport": {"port": 70000}}, "transport.port"),
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"host": {"max_experts": -1}}, "host.max_experts"),
        ({"dht": {"republish_fraction": 1.0}}, "dht.republish_fraction"),
        ({"dht": 7}, "dht"),
    ],
)
def test_errors_name_the_field(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        PeerConfig.preset("local", **overrides)
    assert caught.value.fix


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="moon") as caught:
        PeerConfig.preset("moon")  # type: ignore[arg-type]
    assert "local" in str(caught.value)


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PeerConfig().name = "x"  # type: ignore[misc]


def test_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    path.write_text('preset = "lan"\nname = "x"\n[host]\nmax_experts = 3\n', "utf-8")
    config = PeerConfig.from_toml(path)
    assert (config.name, config.host.max_experts, config.heartbeat_s) == ("x", 3, 10.0)


@pytest.mark.parametrize("text", ["name = ", "nonsense = 1", 'preset = "moon"', "preset = 7", "dht = 3"])
def test_a_profile_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError):
        PeerConfig.from_toml(path)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        PeerConfig.from_toml(tmp_path / "missing.toml")


@pytest.mark.parametrize("section", SECTIONS)
def test_durations_and_sizes_have_units_and_every_field_is_documented(section: type[BaseModel]) -> None:
    source = inspect.getsource(section)
    for name, field in section.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            after = source.split(f"    {name}:", 1)[1].split("\n", 1)[1].lstrip()
            assert after.startswith('"""'), f"{section.__name__}.{name} has no docstring"
        if not {"timeout", "interval", "ttl", "cap", "floor"}.isdisjoint(name.split("_")):
            assert name.endswith("_s"), name


def test_own_messages_must_fit_into_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match="must fit into max_stream_chunk_bytes"):
        PeerConfig.preset("wan", transport={"chunk_bytes": 4 * 1024 * 1024})
