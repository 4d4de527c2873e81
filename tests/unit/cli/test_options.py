"""From a command line to a `PeerConfig`: presets and profiles first, then single options."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.cli.options import peer_config
from swarm.config import PeerConfig
from swarm.errors import ConfigError, UsageError


def test_without_options_it_is_the_preset() -> None:
    assert peer_config(preset=None) == PeerConfig.preset("wan")
    assert peer_config(preset=None, default_preset="local") == PeerConfig.preset("local")
    assert peer_config(preset="lan", default_preset="local") == PeerConfig.preset("lan")


def test_options_change_single_fields(tmp_path: Path) -> None:
    config = peer_config(
        preset="local",
        port=31337,
        listen_host="127.0.0.2",
        announce=["a.example.org:31337"],
        name="lab-7",
        data_dir=tmp_path,
        device="cpu",
        max_experts=0,
    )
    assert (config.transport.port, config.transport.listen_host) == (31337, "127.0.0.2")
    assert config.transport.announce == ("a.example.org:31337",)
    assert (config.name, config.data_dir) == ("lab-7", tmp_path)
    assert (config.host.device, config.host.max_experts) == ("cpu", 0)
    local = PeerConfig.preset("local")
    assert config.dht == local.dht
    assert config.transport.connect_timeout_s == local.transport.connect_timeout_s
    assert config.host.announce_ttl_s == local.host.announce_ttl_s


def test_options_win_over_a_profile(tmp_path: Path) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text('preset = "lan"\nname = "from-file"\n[transport]\nport = 5\nsession_idle_s = 77.0\n', "utf-8")
    config = peer_config(preset=None, profile=profile, port=6)
    assert (config.name, config.transport.port, config.transport.session_idle_s) == ("from-file", 6, 77.0)
    assert config.dht == PeerConfig.preset("lan").dht


def test_preset_and_profile_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude"):
        peer_config(preset="lan", profile=tmp_path / "profile.toml")


def test_errors_are_typed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'moon'"):
        peer_config(preset="moon")
    with pytest.raises(UsageError, match="is not an address"):
        peer_config(preset=None, announce=["nowhere"])
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        peer_config(preset=None, profile=tmp_path / "missing.toml")
