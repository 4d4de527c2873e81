"""Options that several commands share, and what they mean for a peer's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.config import PeerConfig, PresetName
from swarm.errors import UsageError

Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
ListenHost = Annotated[str | None, typer.Option("--listen-host", help="Interface to listen on, e.g. 127.0.0.1.")]
Announce = Annotated[
    list[str] | None,
    typer.Option(
        help="`host:port` that others should dial instead of the detected one. Repeatable.", metavar="HOST:PORT"
    ),
]
DataDir = Annotated[Path | None, typer.Option(help="Folder for identity, keys and checkpoints.", file_okay=False)]
Name = Annotated[str | None, typer.Option(help="What others see this peer called.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")]
LogFile = Annotated[Path | None, typer.Option(help="Append every event to this file, one JSON object a line.")]
Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        help="Module or `.py` file of yours that registers expert classes. Repeatable.",
        metavar="MODULE|FILE",
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="How far apart the run's peers are: `local`, `lan` or `wan`.", metavar="PRESET")
]
Profile = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings of the peer; options given here win over it.", dir_okay=False),
]


def peer_config(
    *,
    preset: str | None,
    profile: Path | None = None,
    default_preset: PresetName = "wan",
    port: int | None = None,
    listen_host: str | None = None,
    announce: Sequence[str] | None = None,
    name: str | None = None,
    data_dir: Path | None = None,
    device: str | None = None,
    max_experts: int | None = None,
) -> PeerConfig:
    """The configuration that a command line describes: preset or profile first, then single options.

    Raises:
        UsageError: Preset and profile are both given, or an address is malformed. ConfigError: a value cannot work.
    """
    from swarm.runs.invite import check_address

    if preset is not None and profile is not None:
        raise UsageError("--preset and --profile exclude each other.", fix="Write `preset = ...` into the profile.")
    base = PeerConfig.preset(preset or default_preset) if profile is None else PeerConfig.from_toml(profile)  # type: ignore[arg-type]
    transport: dict[str, Any] = {"port": port, "listen_host": listen_host}
    if announce:
        transport["announce"] = tuple(check_address(address) for address in announce)
    host: dict[str, Any] = {"device": device, "max_experts": max_experts}
    changes: dict[str, Any] = {
        "name": name,
        "data_dir": data_dir,
        "transport": {k: v for k, v in transport.items() if v is not None},
        "host": {k: v for k, v in host.items() if v is not None},
    }
    values = base.model_dump()
    for key, value in changes.items():
        if isinstance(value, dict):
            values[key] = {**values[key], **value}
        elif value is not None:
            values[key] = value
    return PeerConfig.preset("wan", **values)
