"""`swarm dht`: look into a run's records without taking part in it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from swarm.cli.options import Json
from swarm.cli.report import Reporter, reports_errors
from swarm.config import PeerConfig
from swarm.errors import CallTimeoutError, ConfigError, UsageError, WrongRunError
from swarm.identity import KeyPair, PeerId
from swarm.roles import Role

if TYPE_CHECKING:
    from swarm.dht.node import Dht
    from swarm.net.transport import Contact
    from swarm.runs.credentials import Credential

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 15.0
MAX_SHOWN_CHARS = 200

group = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

Access = Annotated[
    str | None,
    typer.Argument(
        metavar="[INVITE]",
        help="An invite for any role; with the owner's --data-dir a ticket will do. `-` reads it from standard input.",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        help="A peer's data folder: the peers that it remembers are tried too; the owner's needs no invite.",
        file_okay=False,
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", help="Patience in seconds.", min=0.1)]


@dataclass(frozen=True, slots=True)
class _Way:
    """How to get into a run: who we are there, and through whom."""

    run_public_key: bytes
    identity: KeyPair
    credential: Credential
    addresses: list[tuple[str, PeerId]]
    remembered: list[Contact]


@group.callback()
def _root() -> None:
    """Look into a run's distributed hash table: what is published under a key, and who is there.

    Nothing is published, and nobody takes the command for a peer of the run.

    **Examples**

    `swarm dht peers swarmi1aq3d...`

    `swarm dht get experts/ffn swarmi1aq3d... --json`

    `swarm dht get peers/0 --data-dir ~/.swarm/owner/my-lm` on the owner's machine
    """


@group.command("get")
@reports_errors
def get(
    key: Annotated[str, typer.Argument(metavar="KEY", help="What the records are published under.")],
    invite: Access = None,
    data_dir: Folder = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """Show the live entries of a key: author, subkey, version, remaining lifetime and body.

    **Examples**

    `swarm dht get experts/ffn swarmi1aq3d...`
    """
    from swarm.dht.records import Entry

    async def read(dht: Dht) -> list[Entry]:
        return await dht.get(key, fresh=True)

    entries = _run(_way(invite, data_dir), read, timeout_s)
    reporter = Reporter(as_json, live=False)
    for entry in entries:
        body = _plain(entry.body)
        shown = json.dumps(body)
        if len(shown) > MAX_SHOWN_CHARS:
            shown = f"{shown[:MAX_SHOWN_CHARS]}... ({len(shown)} characters; --json shows all)"
        subkey = f"  subkey {json.dumps(entry.subkey)}" if entry.subkey else ""
        reporter.say(
            f"{entry.author.short}{subkey}  version {entry.record_version}  ttl {entry.ttl_s:.0f} s  {shown}",
            "entry",
            key=key,
            author=str(entry.author),
            subkey=entry.subkey,
            record_version=entry.record_version,
            ttl_s=round(entry.ttl_s, 3),
            body=body,
        )
    count = len(entries)
    summary = f"{count} {'entry' if count == 1 else 'entries'} under {json.dumps(key)}."
    reporter.say(summary if count else f"Nothing is published under {json.dumps(key)}.", "done", key=key, entries=count)


@group.command("peers")
@reports_errors
def peers(
    invite: Access = None,
    data_dir: Folder = None,
    timeout_s: Timeout = DEFAULT_TIMEOUT_S,
    as_json: Json = False,
) -> None:
    """List the peers that say they are in the run: name, id, roles, state, addresses.

    **Examples**

    `swarm dht peers swarmi1aq3d...`
    """
    from swarm.runs.membership import PeerRecord, list_peers

    async def read(dht: Dht) -> list[PeerRecord]:
        return await list_peers(dht)

    records = _run(_way(invite, data_dir), read, timeout_s)
    reporter = Reporter(as_json, live=False)
    for record in records:
        roles = sorted(role.value for role in record.roles)
        reporter.say(
            f"{record.peer_id.short}  {record.name}  {','.join(roles)}  {record.state.value}  "
            f"{' '.join(json.dumps(a)[1:-1] for a in record.contact.addresses)}  ttl {record.ttl_s:.0f} s",
            "peer",
            peer_id=str(record.peer_id),
            name=record.name,
            roles=roles,
            state=record.state.value,
            addresses=list(record.contact.addresses),
            metrics=dict(record.metrics),
            record_version=record.record_version,
            ttl_s=round(record.ttl_s, 3),
        )
    count = len(records)
    reporter.say(f"{count} {'peer' if count == 1 else 'peers'}.", "done", peers=count)


def _way(invite: str | None, data_dir: Path | None) -> _Way:
    """What the arguments say about how to get into the run.

    Raises:
        UsageError: They admit nobody, or name nobody to ask. SecurityError: The invite cannot be used.
    """
    from swarm.dht.known import FILE_NAME, read_known
    from swarm.runs.credentials import run_id_of
    from swarm.runs.invite import Invite, Ticket, owner_credential

    text = (typer.get_text_stream("stdin").read(65536) if invite == "-" else invite or "").strip()
    card = Invite.decode(text) if text.startswith("swarmi") else None
    ticket = card.ticket if card else Ticket.decode(text) if text else None
    run_key = _run_key(data_dir)
    identity = KeyPair.generate()
    if card is not None:
        role = Role.MONITOR if Role.MONITOR in card.roles else card.roles[0]
        public_key, credential = card.ticket.run_public_key, card.credential(identity, [role])
    elif run_key is not None:
        public_key, credential = run_key.public_key, owner_credential(run_key, identity, [Role.MONITOR])
        if ticket is not None and ticket.run_public_key != public_key:
            raise WrongRunError("The ticket is for another run than the data directory.", fix="Name the one you mean.")
    else:
        what = "A ticket shows where a run is, but admits nobody" if ticket else "Nothing here admits you to a run"
        raise UsageError(f"{what}.", fix="Give an invite for any role, or the --data-dir of the run's owner.")
    remembered: list[Contact] = []
    if data_dir is not None:
        try:
            remembered = read_known(data_dir / FILE_NAME, run_id_of(public_key))
        except ConfigError:
            if ticket is None:
                raise
    if ticket is None and not remembered:
        raise UsageError(
            f"Nobody of the run is known in {data_dir}.", fix="Give a ticket or an invite, which name somebody."
        )
    return _Way(public_key, identity, credential, ticket.addresses if ticket else [], remembered)


def _run_key(data_dir: Path | None) -> KeyPair | None:
    """The run's private key in its owner's data directory."""
    path = None if data_dir is None else data_dir / "run_key.pem"
    return KeyPair.load_or_create(path) if path is not None and path.exists() else None


def _run(way: _Way, work: Callable[[Dht], Awaitable[T]], timeout_s: float) -> T:
    """Enter the run, do the work, leave.

    Raises:
        BootstrapError: Nobody could be reached. CallTimeoutError: It took too long.
    """
    from swarm.net.loop import loop_thread

    return loop_thread().run(_visit(way, work, timeout_s))


async def _visit(way: _Way, work: Callable[[Dht], Awaitable[T]], timeout_s: float) -> T:
    from swarm.dht.bootstrap import bootstrap_addresses
    from swarm.dht.node import Dht
    from swarm.net.grpc import GrpcTransport
    from swarm.runs.membership import CredentialAuthorizer
    from swarm.runtime import Runtime

    config = PeerConfig.preset(
        "wan",
        transport={"listen_host": "127.0.0.1", "connect_timeout_s": min(10.0, timeout_s)},
        dht={"call_timeout_s": min(5.0, timeout_s)},
    )
    runtime = Runtime()
    authorizer = CredentialAuthorizer(way.run_public_key, way.credential, way.identity, runtime.clock)
    transport = GrpcTransport(way.identity, authorizer, config, runtime)
    dht = Dht(transport, config.dht, runtime)  # not started: it asks, but is not asked
    await transport.start()
    try:
        async with asyncio.timeout(timeout_s):
            contacts = await bootstrap_addresses(transport, way.addresses, way.remembered)
            await dht.bootstrap(contacts)
            return await work(dht)
    except TimeoutError as error:
        raise CallTimeoutError(
            f"The run did not answer within {timeout_s:g} s.", fix="Try again with a longer --timeout."
        ) from error
    finally:
        await dht.close()
        await transport.close(0.0)


def _plain(value: Any) -> Any:
    """A record's body as JSON can show it: bytes in hexadecimal, keys as text, no number that JSON lacks."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k if isinstance(k, str) else json.dumps(_plain(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
