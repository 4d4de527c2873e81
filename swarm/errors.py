"""The one exception tree of swarm.

Every failure that a user can cause or meet is a `SwarmError`. The tree has one branch per concern, and the command line
maps a branch to a stable exit code:

```
SwarmError                    exit  what went wrong
 ├─ UsageError        1xxx      2   an argument, a setting or a file the user gave
 ├─ NetworkError      2xxx      3   reaching another peer
 ├─ SecurityError     3xxx      4   identity, run, invite, session, role
 ├─ WireError         4xxx      5   bytes that another peer sent, or that we refuse to send
 ├─ DhtError          5xxx      6   records
 ├─ ExpertError       6xxx      7   remote experts
 ├─ AveragingError    7xxx      8   rounds
 ├─ StateError        8xxx      9   snapshots and checkpoints
 └─ ProcessError      9xxx     10   processes that swarm started
```

A message is a sentence that names the cause; `fix` says what to do about it. `code` is stable and travels on the wire,
so that an error raised by a remote handler arrives as the same class (`remote` then names the peer that raised it).
"""

from __future__ import annotations

from typing import Any, ClassVar


class SwarmError(Exception):
    """Base of every error that swarm raises on purpose.

    Args:
        message: One sentence that names the cause.
        fix: What the reader can do about it, if anything.
    """

    code: ClassVar[int] = 1
    exit_code: ClassVar[int] = 1
    ambiguous: ClassVar[bool] = False
    """True if the remote side may have acted on the call although it failed (a timeout, a lost connection)."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.remote: str | None = None
        """Id of the peer whose handler raised this, when it came over the wire."""

    def __str__(self) -> str:
        where = f" (from peer {self.remote[:8]})" if self.remote else ""
        text = f"[E{self.code}] {self.message}{where}"
        if not self.fix:
            return text
        return f"{text}{'' if text.endswith(('.', '!', '?')) else '.'} Fix: {self.fix}"

    def to_wire(self) -> dict[str, Any]:
        """Code, message and fix as plain values; never a traceback."""
        return {"code": self.code, "message": self.message[:500], "fix": (self.fix or "")[:500]}


class UsageError(SwarmError):
    """An argument, a setting or a file that the user gave cannot be used."""

    code, exit_code = 1000, 2


class ConfigError(UsageError):
    """A setting has a value that cannot work, or a configuration file is malformed."""

    code = 1001


class LoopThreadError(UsageError):
    """A blocking call was made on swarm's own event-loop thread, where it would wait for itself."""

    code = 1002


class ClosedError(UsageError):
    """The object was used after it was closed."""

    code = 1003


class UnknownExpertClassError(UsageError):
    """A manifest names an expert class that is not registered in this process."""

    code = 1004


class UnknownOptimizerError(UsageError):
    """A manifest names an optimizer that torch does not ship and nothing in this process registers."""

    code = 1005


class NetworkError(SwarmError):
    """Reaching another peer failed."""

    code, exit_code = 2000, 3


class PeerUnreachableError(NetworkError):
    """No connection to the peer could be made; the call was not sent."""

    code = 2001


class BootstrapError(NetworkError):
    """None of the bootstrap addresses led into the run.

    Attributes:
        reasons: Each address with why.
        remembered: Those of them that the invite does not name: addresses of peers met in an earlier start.
    """

    code = 2002

    def __init__(
        self,
        message: str,
        *,
        fix: str | None = None,
        reasons: dict[str, str] | None = None,
        remembered: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, fix=fix)
        self.reasons = reasons or {}
        self.remembered = remembered


class CallTimeoutError(NetworkError):
    """The peer did not answer within the deadline."""

    code, ambiguous = 2003, True


class ConnectionLostError(NetworkError):
    """The connection broke after the call was sent."""

    code, ambiguous = 2004, True


class PortInUseError(NetworkError):
    """The listening port is taken by another process."""

    code = 2005


class RateLimitedError(NetworkError):
    """The peer refuses more calls from us for now. Retry later."""

    code = 2006


class RemoteFailureError(NetworkError):
    """The remote handler failed in a way that it did not foresee."""

    code, ambiguous = 2007, True


class MethodNotServedError(NetworkError):
    """The peer does not serve this method (it plays another role or runs another version)."""

    code = 2008


class SecurityError(SwarmError):
    """Identity, run membership, session or role was refused."""

    code, exit_code = 3000, 4


class IdentityMismatchError(SecurityError):
    """Somebody else answers at this address than the peer we expected (or a man in the middle)."""

    code = 3001


class WrongRunError(SecurityError):
    """The peer belongs to another run."""

    code = 3002


class BadSignatureError(SecurityError):
    """A signature does not match what it is said to sign."""

    code = 3003


class InvalidInviteError(SecurityError):
    """The ticket, invite or credential is malformed or was altered."""

    code = 3004


class ExpiredInviteError(SecurityError):
    """The invite or credential has expired."""

    code = 3005


class AdmissionRefusedError(SecurityError):
    """The peer does not admit us (or we do not admit it) to the run."""

    code = 3006


class UnknownSessionError(SecurityError):
    """The session token is unknown or has expired; a new hello is needed."""

    code = 3007


class NotAuthorizedError(SecurityError):
    """The peer's role does not allow this method."""

    code = 3008


class ProtocolVersionError(SecurityError):
    """The peers speak protocol versions that cannot work together."""

    code = 3009


class WireError(SwarmError):
    """Bytes received from a peer are not acceptable."""

    code, exit_code = 4000, 5


class MalformedFrameError(WireError):
    """A frame, header or message cannot be parsed or has fields of the wrong type."""

    code = 4001


class FrameTooLargeError(WireError):
    """A message announces or carries more than the agreed limit; nothing was allocated for it."""

    code = 4002


class TruncatedStreamError(WireError):
    """The stream ended before everything that its header announced had arrived."""

    code = 4003


class UnsupportedDtypeError(WireError):
    """The dtype or codec is unknown, or the codec cannot carry this dtype."""

    code = 4004


class SchemaMismatchError(WireError):
    """Tensors have other shapes or dtypes than agreed."""

    code = 4005


class NonFiniteError(WireError):
    """A tensor holds NaN or infinity where only finite values are allowed."""

    code = 4006


class DhtError(SwarmError):
    """A DHT operation failed."""

    code, exit_code = 5000, 6


class RecordRefusedError(DhtError):
    """A record was refused: too large, badly signed, outdated, expired, over a quota, or not what its key is for.

    Attributes:
        reason: One word for counting.
        record_version: With "outdated": the version that is known.
    """

    code = 5001

    def __init__(
        self, message: str, *, fix: str | None = None, reason: str = "refused", record_version: int = 0
    ) -> None:
        super().__init__(message, fix=fix)
        self.reason = reason
        self.record_version = record_version


class NotStoredError(DhtError):
    """No peer accepted the record."""

    code = 5002


class ExpertError(SwarmError):
    """A remote expert could not do its work."""

    code, exit_code = 6000, 7


class UnknownExpertError(ExpertError):
    """The host does not hold an expert of this uid."""

    code = 6001


class HostBusyError(ExpertError):
    """The host's queue is full. Nothing was done; retry later or elsewhere."""

    code = 6002


class UnknownRequestError(ExpertError):
    """The host no longer holds the inputs of this request; send the backward pass again with inputs."""

    code = 6003


class NotEnoughExpertsError(ExpertError):
    """Fewer experts answered than `k_min` requires."""

    code = 6004


class ExpertsNotReadyError(ExpertError):
    """The wait for experts ended before enough of them were online."""

    code = 6005


class ExpertFailedError(ExpertError):
    """The expert's own code raised while it computed."""

    code = 6006


class StaleRequestError(ExpertError):
    """The request is older than the host's memory of applied gradients, or was applied already."""

    code = 6007


class AveragingError(SwarmError):
    """An averaging round failed."""

    code, exit_code = 7000, 8


class NoGroupError(AveragingError):
    """The peer that leads the group refused or dissolved it."""

    code = 7001


class StateError(SwarmError):
    """A snapshot or checkpoint cannot be used."""

    code, exit_code = 8000, 9


class NoDonorError(StateError):
    """No peer could give the state."""

    code = 8001


class CorruptStateError(StateError):
    """A chunk or file does not match its hash."""

    code = 8002


class SnapshotGoneError(StateError):
    """The donor no longer serves this snapshot."""

    code = 8003


class TransferInterruptedError(StateError):
    """A download of state broke off. What arrived is verified and kept: the next attempt fetches only the rest."""

    code = 8004


class ProcessError(SwarmError):
    """A process that swarm started failed or did not become ready."""

    code, exit_code = 9000, 10


def _all_classes(root: type[SwarmError]) -> list[type[SwarmError]]:
    return [root, *(c for sub in root.__subclasses__() for c in _all_classes(sub))]


def error_from_wire(fields: dict[str, Any], remote: str) -> SwarmError:
    """Rebuild the error that a remote handler raised.

    Args:
        fields: What `SwarmError.to_wire` produced; unknown codes become `RemoteFailureError`, malformed fields too.
        remote: Id of the peer that raised it.
    """
    by_code = {c.code: c for c in _all_classes(SwarmError)}
    code, message, fix = fields.get("code"), fields.get("message"), fields.get("fix")
    cls = by_code.get(code, RemoteFailureError) if isinstance(code, int) else RemoteFailureError
    error = cls(str(message)[:500], fix=str(fix)[:500] if fix else None)
    error.remote = remote
    return error
