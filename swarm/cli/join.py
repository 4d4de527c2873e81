"""`swarm join`: take part in somebody's run until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.cli.datadir import swarm_home
from swarm.cli.options import (
    Announce,
    DataDir,
    Imports,
    Json,
    ListenHost,
    LogFile,
    Name,
    Port,
    Preset,
    Profile,
    peer_config,
)
from swarm.cli.report import Reporter, reports_errors
from swarm.cli.stopping import ABORTED_EXIT_CODE
from swarm.config import PeerConfig
from swarm.datadir import check_free
from swarm.errors import UsageError
from swarm.roles import Role

NO_REMOTE_CODE = "No remote code runs here: this machine computes only with expert classes that you installed."


@reports_errors
def command(
    invite: Annotated[
        str, typer.Argument(metavar="INVITE", help="The string from the run's owner; `-` reads it from standard input.")
    ],
    role: Annotated[
        Role | None,
        typer.Option(help="One of the roles that the invite admits; none takes `host`, or the first.", metavar="ROLE"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where experts compute: `cpu`, `cuda`, `cuda:1`, or `auto`.")
    ] = None,
    max_experts: Annotated[int | None, typer.Option(help="Hold at most this many experts.", min=0)] = None,
    port: Port = None,
    listen_host: ListenHost = None,
    announce: Announce = None,
    name: Name = None,
    data_dir: DataDir = None,
    imports: Imports = None,
    preset: Preset = None,
    profile: Profile = None,
    log_file: LogFile = None,
    as_json: Json = False,
) -> None:
    """Join a run with an invite and host experts until Ctrl-C, then leave cleanly.

    The first Ctrl-C hands the experts over and leaves, a second one aborts. No remote code runs here: a run can only
    ask for expert classes that you installed, or named with `--import`.

    The peer's identity is kept in the data folder (default `~/.swarm/runs/RUN`), so that the peer is the same after a
    restart. Two peers on one machine need a `--data-dir` each.

    **Examples**

    `swarm join swarmi1aq3d...` joins in the role of the invite

    `swarm join swarmi1aq3d... --device cuda:1 --max-experts 8 --name lab-7`

    `swarm join - < invite.txt` keeps the invite out of the process list

    `swarm join swarmi1aq3d... --profile peers/host/profile.toml --json`
    """
    from swarm.runs.invite import Invite

    text = typer.get_text_stream("stdin").read(65536) if invite == "-" else invite
    card = Invite.decode(text)
    chosen = role or (Role.HOST if Role.HOST in card.roles else card.roles[0])
    if chosen not in card.roles:
        raise UsageError(
            f"The invite admits peers as {', '.join(card.roles)}, not as {chosen}.",
            fix="Ask for an invite for that role.",
        )
    if chosen is Role.TRAINER:
        raise UsageError(
            "A trainer runs your training script, not this command.",
            fix='Call swarm.join(INVITE, role="trainer") in the script.',
        )
    config = peer_config(
        preset=preset,
        profile=profile,
        port=port,
        listen_host=listen_host,
        announce=announce,
        name=name,
        device=device,
        max_experts=max_experts,
    )
    folder = data_dir or config.data_dir or swarm_home() / "runs" / card.ticket.run_id.hex()[:16]
    reporter = Reporter(as_json)
    try:
        check_free(folder)  # the peer takes it; a command that cannot begin says so before torch is imported
        _take_part(reporter, text, chosen, config.model_copy(update={"data_dir": folder}), imports or [], log_file)
    except KeyboardInterrupt:
        reporter.close()
        typer.echo("swarm: aborted", err=True)
        raise typer.Exit(ABORTED_EXIT_CODE) from None


def _take_part(
    reporter: Reporter, invite: str, role: Role, config: PeerConfig, imports: list[str], log_file: Path | None
) -> None:
    from swarm.cli.watching import event_stream, run_until_stopped

    reporter.say(NO_REMOTE_CODE, "notice", message=NO_REMOTE_CODE)
    reporter.say(f"JOINING  as {role.value}", "state", state="JOINING", role=role.value)
    from swarm.experts.registry import import_modules
    from swarm.run import join

    import_modules(imports)
    with event_stream(reporter, f"as {role.value}", log_file) as events:
        peer = join(invite, role=role, config=config, events=events)
        try:
            reporter.say(
                f"Joined {peer.manifest.name} as {peer.name}, reachable at {', '.join(peer.contact.addresses)}.",
                "joined",
                run=peer.manifest.name,
                run_id=peer.run_id.hex(),
                peer_id=str(peer.peer_id),
                name=peer.name,
                role=role.value,
                addresses=list(peer.contact.addresses),
            )
            run_until_stopped(reporter, peer, peer.close)
        finally:
            reporter.close()
            peer.close()
