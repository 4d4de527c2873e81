"""What ships: the project file, the README's commands, the licence, and deployment profiles that boot."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import swarm
from swarm.config import PeerConfig
from swarm.roles import Role

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
README = (ROOT / "README.md").read_text("utf-8")
PROFILES = sorted((ROOT / "peers").glob("*/profile.toml"))


def test_the_version_is_stated_once_for_both() -> None:
    assert PROJECT["project"]["version"] == swarm.__version__
    assert PROJECT["project"]["name"] == "swarm-train"


def test_the_readme_has_the_two_commands() -> None:
    assert "pip install -e . && swarm demo" in README
    assert "pip install -e '.[dev]' && pytest" in README
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "pip install --quiet --disable-pip-version-check -e '.[dev]'\npytest" in ci


def test_the_readme_shows_names_and_options_that_exist() -> None:
    python = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    for name in set(re.findall(r"swarm\.([A-Za-z_]+)", python)):
        assert name in swarm.__all__, name
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        compile(block, "README.md", "exec")


def test_the_readmes_run_file_can_be_loaded(tmp_path: Path) -> None:
    from swarm.runs.runfile import RunFile

    path = tmp_path / "run.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", README, re.DOTALL)[0], "utf-8")
    assert RunFile.load(path).experts[0].size == 16


def test_the_readmes_expert_can_be_registered() -> None:
    from swarm.experts.registry import input_specs
    from swarm.experts.spec import registered

    block = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    try:
        namespace: dict[str, Any] = {"__name__": "readme"}
        exec(compile(block.split("adamw = ")[0], "README.md", "exec"), namespace)
        grid = swarm.ExpertGrid("ffn.[0:4].[0:4]", namespace["Gated"], config={"hid": 8})
        assert input_specs(grid)[0].shape == (None, 8)
    finally:
        registered.pop("gated", None)


def test_the_licence_is_complete() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_types_are_shipped() -> None:
    assert (ROOT / "swarm" / "py.typed").exists()


def test_the_continuous_integration_script_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.read_text("utf-8").startswith("#!/usr/bin/env bash\n")
    if os.name == "posix":
        assert os.access(script, os.X_OK)


def test_every_deployed_role_has_its_folder() -> None:
    folders = {p.parent.name for p in PROFILES}
    assert folders == {"host", "trainer", "bootstrap", "monitor"}
    assert folders <= {role.value for role in Role}
    for folder in folders:
        assert (ROOT / "peers" / folder / f"swarm-{folder}.service").exists()


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.parent.name)
def test_profiles_load_and_explain_every_setting(path: Path) -> None:
    config = PeerConfig.from_toml(path)
    assert config != PeerConfig.preset("wan")
    for line in path.read_text("utf-8").splitlines():
        assert not line or line.startswith(("#", "[")) or "#" in line, f"{path}: no comment on {line!r}"


@pytest.mark.parametrize("path", sorted((ROOT / "peers").glob("*/*.service")), ids=lambda p: p.stem)
def test_units_call_commands_and_options_that_exist(path: Path) -> None:
    import importlib
    import inspect

    from swarm.cli.main import COMMANDS

    text = path.read_text("utf-8")
    assert "KillSignal=SIGINT" in text
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    if "/swarm " not in line:
        return
    _, command, *arguments = line.split()
    parameters = inspect.signature(importlib.import_module(COMMANDS[command]).command).parameters
    for argument in arguments:
        if argument.startswith("--"):
            assert argument[2:].replace("-", "_") in parameters, argument


@pytest.mark.parametrize("path", PROFILES, ids=lambda p: p.parent.name)
def test_profiles_boot(path: Path) -> None:
    """Each profile starts a real peer of its role and leaves; only address, device and patience are the test's own."""
    role = path.parent.name
    profile = PeerConfig.from_toml(path)
    here = {"listen_host": "127.0.0.1", "port": 0, "announce": ()}
    config = profile.model_copy(
        update={
            "transport": profile.transport.model_copy(update=here),
            "host": profile.host.model_copy(update={"device": "cpu"}),
        }
    )
    grid = swarm.ExpertGrid("ffn.[0:2]", "nop", config={"hid": 4})
    if role == "bootstrap":
        with swarm.create_run("profiles", [grid], config=config) as run:
            assert run.bootstrap.condition.value == "ONLINE"
            assert run.ticket.startswith("swarmt1")
        return
    with swarm.create_run("profiles", [grid]) as run, run.peer(role=role, config=config) as peer:
        assert peer.condition.value == "ONLINE"
        assert peer.roles == {Role(role)}
        assert (peer.host is not None) == (role == "host")
        assert peer.name == (profile.name or peer.peer_id.short)
