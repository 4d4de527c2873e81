"""Sessions that a peer grants after hello, and the per-peer rate limit that hangs on them.

A token is 32 random bytes. Only its hash is stored, so that a memory dump or a log of the table opens nothing. A
session belongs to the server that granted it, ends when idle, and is not bound to an IP address.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable

from swarm.clock import Clock
from swarm.errors import ExpiredInviteError, RateLimitedError, UnknownSessionError
from swarm.identity import PeerId
from swarm.net.hello import TOKEN_BYTES, Met
from swarm.net.transport import CallContext

MAX_SESSIONS = 16384
MAX_SESSIONS_PER_PEER = 8
MAX_STREAMS_PER_PEER = 256
"""Streams that one peer may hold open to us; each costs memory also when nothing travels on it."""
_SWEEP_EVERY = 256


class RateLimit:
    """A token bucket: `per_s` calls a second with a burst of twice that, or of `burst`."""

    __slots__ = ("_burst", "_clock", "_last_s", "_per_s", "_tokens")

    def __init__(self, per_s: float, clock: Clock, burst: float | None = None) -> None:
        self._per_s = per_s
        self._burst = 2 * per_s if burst is None else burst
        self._clock = clock
        self._tokens = self._burst
        self._last_s = clock.time()

    def take(self, cost: float = 1.0) -> None:
        """Account for one call. Raises `RateLimitedError`."""
        now = self._clock.time()
        tokens = min(self._burst, self._tokens + (now - self._last_s) * self._per_s)
        self._last_s = now
        if tokens < cost:
            self._tokens = tokens
            raise RateLimitedError(
                f"More than {self._per_s:g} calls per second.",
                fix="Retry after a pause, or raise max_calls_per_s there.",
            )
        self._tokens = tokens - cost

    def charge(self, cost: float) -> None:
        """Take without refusing: what was malformed costs more than a call."""
        self._tokens -= cost


class Session:
    """One granted session.

    Attributes:
        context: What handlers get to know of the caller.
        on_end: Called when the session is ended before its time, one entry per open stream.
    """

    __slots__ = ("context", "expires_wall_s", "key", "on_end", "rate", "used_s")

    def __init__(self, key: bytes, context: CallContext, rate: RateLimit, expires_wall_s: float | None) -> None:
        self.key = key
        self.context = context
        self.rate = rate
        self.expires_wall_s = expires_wall_s
        self.used_s = 0.0
        self.on_end: dict[object, Callable[[], None]] = {}


class SessionTable:
    """All sessions that one peer has granted, in bounded memory.

    Args:
        idle_s: A session that is not used for this long ends.
        max_calls_per_s: Rate limit of one peer id over all its sessions.
        clock: The peer's clock.
    """

    def __init__(self, idle_s: float, max_calls_per_s: float, clock: Clock) -> None:
        self._idle_s = idle_s
        self._max_calls_per_s = max_calls_per_s
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._by_peer: dict[PeerId, dict[bytes, Session]] = {}
        self._granted = 0
        self._rates: OrderedDict[PeerId, RateLimit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def rate(self, peer_id: PeerId) -> RateLimit:
        """The rate limit of a peer id."""
        rate = self._rates.get(peer_id)
        if rate is None:
            rate = self._rates[peer_id] = RateLimit(self._max_calls_per_s, self._clock)
            if len(self._rates) > MAX_SESSIONS:
                self._rates.popitem(last=False)
        return rate

    def grant(self, met: Met, address: str) -> bytes:
        """Open a session for a peer that hello has admitted; returns its token."""
        self._granted += 1
        if self._granted % _SWEEP_EVERY == 0:
            self.sweep()
        token = secrets.token_bytes(TOKEN_BYTES)
        peer_id = met.peer_id
        context = CallContext(peer_id, met.admission.roles, address)
        session = Session(_hash(token), context, self.rate(peer_id), met.admission.expires_wall_s)
        session.used_s = self._clock.time()
        self._sessions[session.key] = session
        of_peer = self._by_peer.setdefault(peer_id, {})
        of_peer[session.key] = session
        if len(of_peer) > MAX_SESSIONS_PER_PEER:
            self._end(min(of_peer.values(), key=lambda s: s.used_s))
        if len(self._sessions) > MAX_SESSIONS:
            self._end(next(iter(self._sessions.values())))
        return token

    def open_streams(self, peer_id: PeerId) -> int:
        """How many streams a peer holds open to us, over all its sessions."""
        return sum(len(session.on_end) for session in self._by_peer.get(peer_id, {}).values())

    def find(self, token: bytes | None) -> Session:
        """The live session of a token. Raises `UnknownSessionError`, `ExpiredInviteError`."""
        session = self._sessions.get(_hash(token)) if token else None
        if session is None:
            raise UnknownSessionError("There is no session for this call.", fix="Say hello first.")
        now = self._clock.time()
        if now - session.used_s > self._idle_s and not session.on_end:
            self._end(session)
            raise UnknownSessionError("The session was idle for too long.", fix="Say hello again.")
        if session.expires_wall_s is not None and self._clock.wall() > session.expires_wall_s:
            self._end(session)
            raise ExpiredInviteError(
                "The credential shown at hello has expired.", fix="Ask the run's owner for a new invite."
            )
        session.used_s = now
        return session

    def sweep(self) -> None:
        """Drop what has been idle for too long. `find` checks on its own; this frees the memory."""
        now = self._clock.time()
        for session in list(self._sessions.values()):
            if now - session.used_s > self._idle_s and not session.on_end:
                self._end(session)

    def end_peer(self, peer_id: PeerId) -> int:
        """End every session of a peer and its open streams; returns how many sessions ended."""
        sessions = list(self._by_peer.get(peer_id, {}).values())
        for session in sessions:
            self._end(session)
        return len(sessions)

    def _end(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        of_peer = self._by_peer.get(session.context.peer_id)
        if of_peer is not None:
            of_peer.pop(session.key, None)
            if not of_peer:
                del self._by_peer[session.context.peer_id]
        callbacks = list(session.on_end.values())
        session.on_end.clear()
        for end in callbacks:
            end()


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
