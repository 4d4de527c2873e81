"""`swarm create`: start a run from a `run.toml`; this process is its first peer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.datadir import swarm_home
from swarm.cli.options import Announce, DataDir, Json, ListenHost, LogFile, Port, Profile, peer_config
from swarm.cli.report import Reporter, reports_errors
from swarm.cli.stopping import ABORTED_EXIT_CODE
from swarm.datadir import check_free
from swarm.errors import UsageError
from swarm.roles import Role

if TYPE_CHECKING:
    from swarm.config import PeerConfig
    from swarm.run import Run
    from swarm.runs.runfile import RunFile

NEVER = "never"
INVITED_ROLES = (Role.HOST, Role.TRAINER, Role.BOOTSTRAP, Role.MONITOR)


@reports_errors
def command(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="The description of the run.", show_default=False)
    ],
    port: Port = None,
    listen_host: ListenHost = None,
    announce: Announce = None,
    data_dir: DataDir = None,
    role: Annotated[
        list[Role] | None,
        typer.Option(help="`host`: this machine hosts experts, too.", metavar="ROLE"),
    ] = None,
    expires: Annotated[
        str,
        typer.Option(
            help="How long the printed invites count, e.g. `12h` or `30d` (and 15 minutes more, as clocks differ); "
            "or `never`."
        ),
    ] = "7d",
    profile: Profile = None,
    log_file: LogFile = None,
    as_json: Json = False,
) -> None:
    """Start a run and print its ticket and one invite per role; runs until Ctrl-C.

    The run's private key is written to the data folder (default `~/.swarm/owner/NAME`). Whoever has it owns the run:
    keep a copy. Starting again with the same folder continues the same run.

    **Examples**

    `swarm create run.toml --port 31337 --announce my.server.org:31337`

    `swarm create run.toml --role host` also hosts experts on this machine

    `swarm create run.toml --json` prints one JSON object a line; that of kind `created` has ticket and invites

    **A run.toml**

        name = "my-lm"
        preset = "wan"            # local, lan or wan
        imports = []              # your modules that register expert classes

        [[experts]]
        grid = "ffn.[0:4].[0:4]"  # 16 experts
        module = "ffn"
        config = { hid = 256 }
        replicas = 2
        optimizer = { name = "adamw", lr = 1e-3 }
    """
    from swarm.runs.invite import parse_duration
    from swarm.runs.runfile import RunFile

    if others := [r.value for r in role or () if r not in (Role.HOST, Role.BOOTSTRAP)]:
        raise UsageError(
            f"swarm create cannot play the role {others[0]}.", fix="Use `swarm join` with an invite for it."
        )
    if expires != NEVER:
        parse_duration(expires)
    described = RunFile.load(run_file)
    folder = data_dir or swarm_home() / "owner" / described.name
    config = peer_config(
        preset=None,
        profile=profile,
        default_preset=described.preset,
        port=port,
        listen_host=listen_host,
        announce=announce,
    )
    reporter = Reporter(as_json)
    try:
        check_free(folder)  # the peer takes it; a command that cannot begin says so before torch is imported
        _run_first_peer(reporter, described, config, folder, [Role.BOOTSTRAP, *(role or ())], expires, log_file)
    except KeyboardInterrupt:
        reporter.close()
        typer.echo("swarm: aborted", err=True)
        raise typer.Exit(ABORTED_EXIT_CODE) from None


def _run_first_peer(
    reporter: Reporter,
    described: RunFile,
    config: PeerConfig,
    folder: Path,
    roles: list[Role],
    expires: str,
    log_file: Path | None,
) -> None:
    # said before torch is imported, which takes a moment
    reporter.say(f"JOINING  {described.name}: starting its first peer", "state", state="JOINING")
    from swarm.cli.watching import event_stream, run_until_stopped
    from swarm.experts.registry import import_modules, resolve_optimizer
    from swarm.run import create_run

    import_modules(described.imports)
    for grid in described.experts:
        resolve_optimizer(grid.optimizer.name)  # a misspelt name is found out here, not on every host
    with event_stream(reporter, described.name, log_file) as events:
        run = create_run(described.name, described.experts, roles=roles, config=config, data_dir=folder, events=events)
        try:
            valid_for = None if expires == NEVER else expires
            invites = {r.value: run.invite(r, expires=valid_for) for r in INVITED_ROLES}
            _tell(reporter, run, folder, expires, invites)
            run_until_stopped(reporter, run.bootstrap, run.close)
        finally:
            reporter.close()
            run.close()


def _tell(reporter: Reporter, run: Run, folder: Path, expires: str, invites: dict[str, str]) -> None:
    peer, manifest = run.bootstrap, run.manifest
    roles, addresses = ", ".join(sorted(peer.roles)), ", ".join(peer.contact.addresses)
    lines = [
        f"Run {manifest.name} is up ({roles}), reachable at {addresses}.",
        f"Experts: {', '.join(f'{g.size} x {g.module_name} in {g.name}' for g in manifest.experts) or 'none'}.",
        f"The run's key and this peer's identity are in {folder}.",
        "",
        "Ticket (public, to watch):",
        f"  {run.ticket}",
        "",
        f"Invites (secret, {'without expiry' if expires == 'never' else f'valid for {expires}'}):",
        *(f"  swarm join {invite}  # {role}\n" for role, invite in invites.items()),
    ]
    reporter.say(
        "\n".join(lines).rstrip() + "\n",
        "created",
        run=manifest.name,
        run_id=run.run_id.hex(),
        peer_id=str(peer.peer_id),
        addresses=list(peer.contact.addresses),
        ticket=run.ticket,
        invites=invites,
        expires=expires,
        data_dir=str(folder),
    )
