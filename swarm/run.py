"""Runs as their owners and members see them: create one, invite people, join one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from swarm.config import PeerConfig
from swarm.datadir import DataDirLock
from swarm.errors import ClosedError, ConfigError, ProtocolVersionError, SwarmError, UsageError, WrongRunError
from swarm.events import EventStream
from swarm.experts.registry import profile
from swarm.experts.spec import ExpertGrid
from swarm.identity import KeyPair
from swarm.net.addresses import is_loopback
from swarm.peer import Peer
from swarm.roles import Role
from swarm.runs.invite import DEFAULT_EXPIRY, Invite, Ticket, owner_credential
from swarm.runs.manifest import Manifest

IDENTITY_FILE = "identity.pem"
RUN_KEY_FILE = "run_key.pem"
MANIFEST_FILE = "manifest.json"


def identity_for(config: PeerConfig) -> KeyPair:
    """The identity kept in `config.data_dir`, made on first use; a passing one without a data directory."""
    if config.data_dir is None:
        return KeyPair.generate()
    return KeyPair.load_or_create(config.data_dir / IDENTITY_FILE)


@contextmanager
def _released_on_error(directory: Path | None) -> Iterator[DataDirLock | None]:
    """Take the data directory, before anything in it is read or written, for a peer that the block starts."""
    lock = None if directory is None else DataDirLock(directory)
    try:
        yield lock
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def parse_role(role: str | Role) -> Role:
    """The role of this name. Raises `UsageError`."""
    try:
        return Role(role)
    except ValueError as error:
        raise UsageError(f"There is no role {role!r}.", fix=f"Use one of {', '.join(Role)}.") from error


class Run:
    """A run in its owner's hands: the run key, the signed manifest and the first peer. A context manager.

    Attributes:
        bootstrap: The first peer, through which others join. It runs in this process until `close`.
    """

    def __init__(self, run_key: KeyPair, signed_manifest: bytes, config: PeerConfig, bootstrap: Peer) -> None:
        self._run_key = run_key
        self._signed_manifest = signed_manifest
        self._config = config
        self._peers: list[Peer] = []
        self.bootstrap = bootstrap

    @property
    def manifest(self) -> Manifest:
        """The description that peers check themselves against."""
        return self.bootstrap.manifest

    @property
    def run_id(self) -> bytes:
        """Hash of the run's public key (32 bytes)."""
        return self.manifest.run_id

    @property
    def ticket(self) -> str:
        """The run's public address, for those who only watch."""
        return Ticket(self._run_key.public_key, (self.bootstrap.contact,)).encode()

    def invite(self, role: str | Role | Sequence[str | Role] = Role.HOST, expires: str | None = DEFAULT_EXPIRY) -> str:
        """One string with which its holder joins the run: `swarm join STRING`.

        Args:
            role: What it admits its holder as; several roles may be given.
            expires: How long it admits, e.g. `"7d"`, `"12h"`; none for ever.

        Raises:
            UsageError: The role or the duration is unknown.
        """
        roles = [role] if isinstance(role, str) else list(role)
        chosen = [parse_role(r) for r in roles]
        return Invite.issue(self._run_key, [self.bootstrap.contact], chosen, expires).encode()

    def peer(self, role: str | Role = Role.TRAINER, *, config: PeerConfig | None = None) -> Peer:
        """A peer of this run in this process, online when this returns. Closed with the run at the latest.

        Args:
            role: What the peer does.
            config: Its settings; none takes the run's, with a port and an identity of its own.

        Raises:
            ClosedError: The run was closed.
        """
        self._check_open()
        if config is None:
            transport = self._config.transport.model_copy(update={"port": 0, "announce": ()})
            config = self._config.model_copy(update={"transport": transport, "data_dir": None, "name": ""})
        peer = join(self.invite(role, expires=None), role=role, config=config)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        """Close every peer that this object started, the first one last. Idempotent."""
        while self._peers:
            self._peers.pop().close()
        self.bootstrap.close()

    def _check_open(self) -> None:
        if self.bootstrap.closed:
            raise ClosedError("This run was closed.", fix="Create it again; with a data directory it is the same run.")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def create_run(
    name: str,
    experts: Sequence[ExpertGrid] = (),
    *,
    roles: Sequence[str | Role] = (Role.BOOTSTRAP,),
    config: PeerConfig | None = None,
    data_dir: Path | None = None,
    run_key: KeyPair | None = None,
    events: EventStream | None = None,
) -> Run:
    """Create a run and start its first peer in this process.

    Args:
        name: What people call the run.
        experts: The grids of remote experts; their classes must be registered in this process.
        roles: Roles of the first peer; `bootstrap` is always among them.
        config: Settings of the first peer; none takes the preset for one machine (`local`).
        data_dir: Where run key, manifest and identity are kept. Creating a run with the same directory again continues
            it: same run id, and invites handed out before stay valid. None keeps everything in memory.
        run_key: The run's key; none takes the one in `data_dir`, or a new one. Whoever has it owns the run.
        events: Where the first peer emits events.

    Raises:
        ConfigError: A name, grid or setting cannot be used, or another peer uses the directory.
        UnknownExpertClassError: A grid's class is not registered.
        PortInUseError: The listening port is taken.
    """
    config = config or PeerConfig.preset("local")
    if data_dir is not None:
        config = config.model_copy(update={"data_dir": data_dir})
    directory = config.data_dir
    for grid in experts:
        profile(grid)
    chosen = sorted({Role.BOOTSTRAP, *(parse_role(r) for r in roles)})
    with _released_on_error(directory) as lock:
        if run_key is None:
            run_key = KeyPair.generate() if directory is None else KeyPair.load_or_create(directory / RUN_KEY_FILE)
        signed = _manifest_of(name, experts, run_key, directory)
        identity = identity_for(config)
        peer = Peer.start(
            identity=identity,
            run_public_key=run_key.public_key,
            credential=owner_credential(run_key, identity, chosen),
            config=config,
            signed_manifest=signed,
            events=events,
            data_dir_lock=lock,
        )
    return Run(run_key, signed, config, peer)


def _manifest_of(name: str, experts: Sequence[ExpertGrid], run_key: KeyPair, directory: Path | None) -> bytes:
    """The signed manifest: the stored one if it says the same, else a new one with the next `manifest_version`."""
    manifest = Manifest(name=name, run_public_key=run_key.public_key, experts=tuple(experts))
    path = None if directory is None else directory / MANIFEST_FILE
    if path is not None and path.exists():
        stored, known = _stored_manifest(path, manifest.run_id)
        manifest = Manifest(name, run_key.public_key, tuple(experts), known.manifest_version)
        if manifest.to_json() == known.to_json():
            return stored
        manifest = Manifest(name, run_key.public_key, tuple(experts), known.manifest_version + 1)
    signed = manifest.sign(run_key)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(signed)
        part.replace(path)
    return signed


def _stored_manifest(path: Path, run_id: bytes) -> tuple[bytes, Manifest]:
    """The manifest that an earlier start left, signed and read. Raises `ConfigError` naming the file."""
    try:
        stored = path.read_bytes()
        return stored, Manifest.verify(stored, run_id)
    except ProtocolVersionError:
        raise  # the file is fine, and the error says what to do
    except WrongRunError as error:
        raise ConfigError(
            f"{path} is the manifest of another run than the key beside it.",
            fix=f"Restore the {RUN_KEY_FILE} of that run, or use another data directory (data_dir, --data-dir).",
        ) from error
    except (OSError, SwarmError) as error:
        reason = error.message if isinstance(error, SwarmError) else error
        raise ConfigError(
            f"{path} cannot be used: {reason}",
            fix="Restore it from a backup, or move it away: a new one is signed with the run's key, and peers that "
            "know a later manifest_version keep that.",
        ) from error


def join(
    invite: str,
    role: str | Role | None = None,
    *,
    config: PeerConfig | None = None,
    data_dir: Path | None = None,
    events: EventStream | None = None,
) -> Peer:
    """Join a run with an invite; returns when this peer is online.

    Args:
        invite: The string that the run's owner handed out.
        role: What to do in the run; none takes the role that the invite admits, `host` first.
        config: Settings; none takes the preset `wan`, or `local` when the run's first peer is on this machine.
        data_dir: Where the identity is kept, so that the peer is the same after a restart. One peer at a time uses it.
        events: Where the peer emits events.

    Raises:
        InvalidInviteError, ExpiredInviteError: The string cannot be used, or not for this role.
        BootstrapError: No address in the invite led into the run; `reasons` has each one's cause.
        PortInUseError, ConfigError, SecurityError: As they say.
    """
    card = Invite.decode(invite)
    chosen = parse_role(role) if role is not None else (Role.HOST if Role.HOST in card.roles else card.roles[0])
    if config is None:
        on_this_machine = all(is_loopback(address) for address, _ in card.ticket.addresses)
        config = PeerConfig.preset("local" if on_this_machine else "wan")
    if data_dir is not None:
        config = config.model_copy(update={"data_dir": data_dir})
    with _released_on_error(config.data_dir) as lock:
        identity = identity_for(config)
        return Peer.start(
            identity=identity,
            run_public_key=card.ticket.run_public_key,
            credential=card.credential(identity, [chosen]),
            config=config,
            bootstrap=card.ticket.addresses,
            events=events,
            data_dir_lock=lock,
        )


def run_key_from_seed(seed: int) -> KeyPair:
    """The run key of a simulation: the same seed gives the same run id and so the same initial weights.

    Anybody can make this key, so a run that is open to others must not use it.
    """
    return KeyPair.from_private_bytes(hashlib.sha256(f"swarm simulation {seed}".encode()).digest())
