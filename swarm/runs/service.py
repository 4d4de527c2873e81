"""Serving and fetching the manifest. Every peer serves the newest one it has checked, so a run outlives its owner."""

from __future__ import annotations

from swarm.errors import MalformedFrameError, NetworkError, NoDonorError, SecurityError, WireError
from swarm.net.transport import CallContext, Contact, Transport, UnaryMethod
from swarm.pb.control_pb2 import ManifestReply, ManifestRequest
from swarm.runs.credentials import run_id_of
from swarm.runs.manifest import Manifest

GET_MANIFEST = UnaryMethod("/swarm.pb.Control/GetManifest", ManifestRequest, ManifestReply)


class ManifestService:
    """Holds a peer's manifest and answers `GetManifest`.

    Args:
        transport: Where to serve.
        signed: A signed manifest.
        run_public_key: The run that it must belong to.

    Raises:
        SwarmError: The manifest does not verify; see `Manifest.verify`.
    """

    def __init__(self, transport: Transport, signed: bytes, run_public_key: bytes) -> None:
        self._run_id = run_id_of(run_public_key)
        self._signed = signed
        self._manifest = Manifest.verify(signed, self._run_id)
        transport.serve(GET_MANIFEST, self._get)

    @property
    def manifest(self) -> Manifest:
        """The manifest that holds."""
        return self._manifest

    @property
    def signed(self) -> bytes:
        """Its signed bytes."""
        return self._signed

    def offer(self, signed: bytes) -> bool:
        """Take a manifest if it is this run's and newer than ours; says whether it was taken.

        Raises:
            SwarmError: It does not verify; ours stays.
        """
        manifest = Manifest.verify(signed, self._run_id)
        if manifest.manifest_version <= self._manifest.manifest_version:
            return False
        self._manifest, self._signed = manifest, signed
        return True

    async def _get(self, context: CallContext, request: ManifestRequest) -> ManifestReply:
        if request.known_version >= self._manifest.manifest_version:
            return ManifestReply()
        return ManifestReply(signed_manifest=self._signed)


async def fetch_signed_manifest(
    transport: Transport, contact: Contact, run_public_key: bytes, *, timeout_s: float | None = None
) -> bytes:
    """Ask one peer for the run's signed manifest and verify it.

    Raises:
        NetworkError: The peer could not be asked. SwarmError: what it gave does not verify.
    """
    reply = await transport.call(contact, GET_MANIFEST, ManifestRequest(known_version=0), timeout_s=timeout_s)
    if not reply.signed_manifest:
        raise MalformedFrameError(f"Peer {contact.peer_id.short} answered without a manifest.")
    Manifest.verify(reply.signed_manifest, run_id_of(run_public_key))
    return reply.signed_manifest


async def fetch_manifest(
    transport: Transport, contact: Contact, run_public_key: bytes, *, timeout_s: float | None = None
) -> Manifest:
    """As `fetch_signed_manifest`, without the signature around it."""
    signed = await fetch_signed_manifest(transport, contact, run_public_key, timeout_s=timeout_s)
    return Manifest.verify(signed, run_id_of(run_public_key))


async def fetch_from_any(
    transport: Transport, contacts: list[Contact], run_public_key: bytes, *, timeout_s: float | None = None
) -> bytes:
    """Ask peers in turn until one gives a signed manifest that verifies.

    Raises:
        NoDonorError: None did; the message has each peer's reason.
    """
    reasons: list[str] = []
    for contact in contacts:
        try:
            return await fetch_signed_manifest(transport, contact, run_public_key, timeout_s=timeout_s)
        except (NetworkError, SecurityError, WireError) as error:
            reasons.append(f"{contact.peer_id.short}: {error.message}")
    raise NoDonorError(
        f"No peer gave the run's manifest ({'; '.join(reasons) or 'nobody could be asked'}).",
        fix="Check that a bootstrap peer of the run is up, then try again.",
    )
