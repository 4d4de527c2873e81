"""Who may do what: the `Authorizer` that every transport asks, and the open policy.

A transport proves identities (see `swarm.net.hello`); an authorizer decides whether a proven identity belongs to the
run and what its roles allow. Real runs use `swarm.runs.membership.CredentialAuthorizer`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import msgpack

from swarm.errors import AdmissionRefusedError, NotAuthorizedError
from swarm.identity import PeerId
from swarm.net.transport import CallContext
from swarm.roles import Role

MAX_CREDENTIAL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Admission:
    """What an authorizer grants to a peer for the time of a session."""

    roles: frozenset[Role]
    expires_wall_s: float | None = None
    """Unix time after which the session ends; none: it does not end by itself."""


class Authorizer(Protocol):
    """Decides about membership and roles. Called on the event loop: implementations must be quick and do no I/O."""

    @property
    def run_id(self) -> bytes:
        """Hash of the run's public key. Peers of another run are refused at hello."""
        ...

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that our own credential grants."""
        ...

    def credential(self) -> bytes:
        """What we show in hello, at most 4 KiB."""
        ...

    def admit(self, peer_id: PeerId, public_key: bytes, credential: bytes) -> Admission:
        """Judge the credential of a peer whose identity is proven. Raises a `SecurityError` to refuse it."""
        ...

    def authorize(self, context: CallContext, roles: frozenset[Role]) -> None:
        """Check one call of a method that `roles` may call. Raises `NotAuthorizedError`."""
        ...


def require_role(context: CallContext, roles: frozenset[Role]) -> None:
    """The usual rule: one of the caller's roles must be among `roles`. Raises `NotAuthorizedError`."""
    if context.roles.isdisjoint(roles):
        has, needs = ", ".join(sorted(context.roles)) or "no role", ", ".join(sorted(roles))
        raise NotAuthorizedError(
            f"This call needs the role {needs}; the caller has {has}.", fix="Join with an invite for that role."
        )


@lru_cache(maxsize=64)
def _claimed(credential: bytes) -> Admission:
    return Admission(frozenset(Role(name) for name in msgpack.unpackb(credential)))


class OpenAuthorizer:
    """The open policy: admits whoever proves its identity, with the roles it claims.

    Args:
        run_id: Hash of the run's public key.
        roles: The roles we claim.
    """

    def __init__(self, run_id: bytes, roles: Iterable[Role]) -> None:
        self.run_id = run_id
        self.roles: frozenset[Role] = frozenset(roles)
        self._credential: bytes = msgpack.packb(sorted(self.roles))

    def credential(self) -> bytes:
        return self._credential

    def admit(self, peer_id: PeerId, public_key: bytes, credential: bytes) -> Admission:
        try:
            return _claimed(credential)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise AdmissionRefusedError(f"Peer {peer_id.short} shows a list of roles that cannot be read.") from error

    def authorize(self, context: CallContext, roles: frozenset[Role]) -> None:
        require_role(context, roles)
