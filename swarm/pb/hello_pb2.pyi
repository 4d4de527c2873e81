from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloFromDialer(_message.Message):
    __slots__ = ("opening", "proof")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    opening: Opening
    proof: Proof
    def __init__(self, opening: _Optional[_Union[Opening, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ...) -> None: ...

class HelloFromListener(_message.Message):
    __slots__ = ("challenge", "welcome")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    welcome: Welcome
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("protocol_version", "run_id", "public_key", "nonce")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: bytes
    public_key: bytes
    nonce: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("protocol_version", "public_key", "nonce", "signature", "credential", "addresses")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    public_key: bytes
    nonce: bytes
    signature: bytes
    credential: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., public_key: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., credential: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("signature", "credential")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    signature: bytes
    credential: bytes
    def __init__(self, signature: _Optional[bytes] = ..., credential: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("token", "idle_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    idle_s: float
    def __init__(self, token: _Optional[bytes] = ..., idle_s: _Optional[float] = ...) -> None: ...
