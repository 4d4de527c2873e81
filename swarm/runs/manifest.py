"""The manifest: the owner's signed description of a run, which every peer checks, keeps and serves to others.

A signed manifest is two lines of text: canonical JSON (sorted keys, no spaces, ASCII) and the hexadecimal Ed25519
signature of that line by the run's key. The signature covers the exact bytes, so peers hand on what they received,
unknown fields included. A field that older peers may ignore can be added freely; one that they must understand raises
`format`, and older peers then refuse the manifest and name the upgrade.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import (
    BadSignatureError,
    ConfigError,
    FrameTooLargeError,
    MalformedFrameError,
    ProtocolVersionError,
    SwarmError,
    WrongRunError,
)
from swarm.experts.spec import ExpertGrid
from swarm.identity import SIGNATURE_BYTES, KeyPair, verify
from swarm.net.transport import PROTOCOL_VERSION
from swarm.runs.credentials import run_id_of

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 512 * 1024
MAX_GRIDS = 256

_DOMAIN = "manifest"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._-]{0,62}[A-Za-z0-9])?")
_UPGRADE = "Upgrade with: pip install --upgrade swarm-train"


class _Body(BaseModel):
    """The JSON form. Fields of later versions are let through; `Manifest.unknown_fields` names them."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    format: int = Field(ge=1)
    manifest_version: int = Field(ge=1, lt=2**63)
    protocol_version: int = Field(ge=1, lt=2**31)
    name: str
    run_public_key: str = Field(pattern="^[0-9a-f]{64}$")
    experts: list[dict[str, Any]] = Field(max_length=MAX_GRIDS)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run trains.

    Attributes:
        name: What people call the run.
        run_public_key: The run's key (32 bytes); its hash is the run id.
        experts: The grids of remote experts.
        manifest_version: Counts the owner's changes; the higher one holds.
        protocol_version: The wire protocol that the run's peers speak.
        unknown_fields: Names of fields that a later version of swarm wrote and this one ignores.
    """

    name: str
    run_public_key: bytes
    experts: tuple[ExpertGrid, ...] = ()
    manifest_version: int = 1
    protocol_version: int = PROTOCOL_VERSION
    unknown_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_run_name(self.name)
        names = [grid.name for grid in self.experts]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ConfigError(f"Two expert grids are called {twice[0]!r}.", fix="Give every grid its own name.")

    @property
    def run_id(self) -> bytes:
        return run_id_of(self.run_public_key)

    @property
    def grids(self) -> dict[str, ExpertGrid]:
        """The grids by name."""
        return {grid.name: grid for grid in self.experts}

    def to_json(self) -> bytes:
        """The canonical JSON that is signed."""
        return _canonical(
            {
                "format": FORMAT_VERSION,
                "manifest_version": self.manifest_version,
                "protocol_version": self.protocol_version,
                "name": self.name,
                "run_public_key": self.run_public_key.hex(),
                "experts": [grid.to_dict() for grid in self.experts],
            }
        )

    def sign(self, run_key: KeyPair) -> bytes:
        """The signed manifest.

        Raises:
            ConfigError: The key is not this run's, the manifest is too large, or an expert's config is not plain JSON.
        """
        if run_key.public_key != self.run_public_key:
            raise ConfigError(
                "The manifest belongs to another run key.", fix="Sign it with the key that the run was created with."
            )
        return sign_json(self.to_json(), run_key)

    @classmethod
    def verify(cls, signed: bytes, run_id: bytes) -> Manifest:
        """Read a signed manifest and check that it is this run's.

        Args:
            signed: What `sign` made.
            run_id: The id of the run that it must belong to (32 bytes).

        Raises:
            FrameTooLargeError, MalformedFrameError: It cannot be one.
            WrongRunError: It belongs to another run. BadSignatureError: the run's key did not sign it.
            ProtocolVersionError: It was written for a later version of swarm.
        """
        if len(signed) > MAX_MANIFEST_BYTES:
            raise FrameTooLargeError(f"A manifest has at most {MAX_MANIFEST_BYTES} bytes; this has {len(signed)}.")
        document, newline, rest = signed.partition(b"\n")
        if not newline or not re.fullmatch(rb"[0-9a-f]{%d}\n" % (2 * SIGNATURE_BYTES), rest):
            raise MalformedFrameError("The manifest is truncated or damaged: it does not end with a signature.")
        values = _parse(document)
        if (
            values.get("format") != FORMAT_VERSION
            and type(values.get("format")) is int
            and values["format"] > FORMAT_VERSION
        ):
            raise ProtocolVersionError("The manifest was written for a later version of swarm.", fix=_UPGRADE)
        try:
            body = _Body.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
            raise MalformedFrameError(f"The manifest has unusable fields: {problems}.") from error
        run_public_key = bytes.fromhex(body.run_public_key)
        if run_id_of(run_public_key) != run_id:
            raise WrongRunError(
                "The manifest belongs to another run.", fix="Use the ticket or invite of the run you mean."
            )
        try:
            verify(run_public_key, _DOMAIN, document, bytes.fromhex(rest.strip().decode()))
        except BadSignatureError as error:
            raise BadSignatureError("The manifest is not signed by the run's key: it was altered.") from error
        if _canonical(values) != document:
            raise MalformedFrameError("The manifest is not in canonical form.")
        if body.protocol_version > PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"The run speaks protocol {body.protocol_version}, this version of swarm {PROTOCOL_VERSION}.",
                fix=_UPGRADE,
            )
        try:
            return cls(
                name=body.name,
                run_public_key=run_public_key,
                experts=tuple(ExpertGrid.from_dict(grid) for grid in body.experts),
                manifest_version=body.manifest_version,
                protocol_version=body.protocol_version,
                unknown_fields=tuple(sorted(body.model_extra or ())),
            )
        except (TypeError, ValueError, KeyError) as error:
            raise MalformedFrameError(f"The manifest describes experts that cannot be read: {error!r}") from error
        except SwarmError as error:
            raise MalformedFrameError(f"The manifest cannot be used: {error.message}", fix=error.fix) from error


def check_run_name(name: str) -> str:
    """Return `name` if it can name a run: 1-64 letters, digits, spaces, `.`, `_`, `-`. Raises `ConfigError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{str(name)[:80]!r} cannot name a run.", fix="Use 1-64 letters, digits, spaces, '.', '_' or '-'."
        )
    return name


def sign_json(document: bytes, run_key: KeyPair) -> bytes:
    """Append the run key's signature to canonical JSON. Raises `ConfigError` when the whole is too large."""
    signed = document + b"\n" + run_key.sign(_DOMAIN, document).hex().encode() + b"\n"
    if len(signed) > MAX_MANIFEST_BYTES:
        raise ConfigError(
            f"The manifest has {len(signed)} bytes, more than {MAX_MANIFEST_BYTES}.",
            fix="Use fewer or smaller expert grids.",
        )
    return signed


def newest(candidates: Sequence[Manifest]) -> Manifest:
    """The manifest with the highest version; the earlier one of equals."""
    return max(candidates, key=lambda manifest: manifest.manifest_version)


def _canonical(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode(
            "ascii"
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The manifest holds a value that JSON cannot carry: {error}",
            fix="Use numbers, text, lists and maps in `config`.",
        ) from error


def _parse(document: bytes) -> dict[str, Any]:
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise MalformedFrameError(f"The manifest is not JSON: {type(error).__name__}.") from error
    if not isinstance(value, dict):
        raise MalformedFrameError("The manifest is not a JSON object.")
    return value
