from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberDeclaration(_message.Message):
    __slots__ = ("key", "schema_hash", "weight", "addresses", "cell", "sends_only", "enters_in_s", "measured")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    SENDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    ENTERS_IN_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    key: str
    schema_hash: bytes
    weight: float
    addresses: _containers.RepeatedScalarFieldContainer[str]
    cell: str
    sends_only: bool
    enters_in_s: float
    measured: _containers.RepeatedCompositeFieldContainer[MeasuredRate]
    def __init__(self, key: _Optional[str] = ..., schema_hash: _Optional[bytes] = ..., weight: _Optional[float] = ..., addresses: _Optional[_Iterable[str]] = ..., cell: _Optional[str] = ..., sends_only: bool = ..., enters_in_s: _Optional[float] = ..., measured: _Optional[_Iterable[_Union[MeasuredRate, _Mapping]]] = ...) -> None: ...

class SignedDeclaration(_message.Message):
    __slots__ = ("declaration", "public_key", "signature")
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    declaration: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, declaration: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class JoinGroupRequest(_message.Message):
    __slots__ = ("key", "declared", "patience_s", "turn")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DECLARED_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    key: str
    declared: SignedDeclaration
    patience_s: float
    turn: int
    def __init__(self, key: _Optional[str] = ..., declared: _Optional[_Union[SignedDeclaration, _Mapping]] = ..., patience_s: _Optional[float] = ..., turn: _Optional[int] = ...) -> None: ...

class MeasuredRate(_message.Message):
    __slots__ = ("peer_id", "up", "down")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    peer_id: bytes
    up: float
    down: float
    def __init__(self, peer_id: _Optional[bytes] = ..., up: _Optional[float] = ..., down: _Optional[float] = ...) -> None: ...

class JoinGroupResponse(_message.Message):
    __slots__ = ("verdict", "seal_within_s", "leader", "leader_addresses", "schema_hash", "reason", "turn")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[JoinGroupResponse.Verdict]
        ACCEPTED: _ClassVar[JoinGroupResponse.Verdict]
        NOT_LOOKING: _ClassVar[JoinGroupResponse.Verdict]
        REDIRECT: _ClassVar[JoinGroupResponse.Verdict]
        FULL: _ClassVar[JoinGroupResponse.Verdict]
        BUSY: _ClassVar[JoinGroupResponse.Verdict]
        MISMATCH: _ClassVar[JoinGroupResponse.Verdict]
        WRONG_WAY: _ClassVar[JoinGroupResponse.Verdict]
        PROBATION: _ClassVar[JoinGroupResponse.Verdict]
    VERDICT_UNSPECIFIED: JoinGroupResponse.Verdict
    ACCEPTED: JoinGroupResponse.Verdict
    NOT_LOOKING: JoinGroupResponse.Verdict
    REDIRECT: JoinGroupResponse.Verdict
    FULL: JoinGroupResponse.Verdict
    BUSY: JoinGroupResponse.Verdict
    MISMATCH: JoinGroupResponse.Verdict
    WRONG_WAY: JoinGroupResponse.Verdict
    PROBATION: JoinGroupResponse.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SEAL_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    verdict: JoinGroupResponse.Verdict
    seal_within_s: float
    leader: bytes
    leader_addresses: _containers.RepeatedScalarFieldContainer[str]
    schema_hash: bytes
    reason: str
    turn: int
    def __init__(self, verdict: _Optional[_Union[JoinGroupResponse.Verdict, str]] = ..., seal_within_s: _Optional[float] = ..., leader: _Optional[bytes] = ..., leader_addresses: _Optional[_Iterable[str]] = ..., schema_hash: _Optional[bytes] = ..., reason: _Optional[str] = ..., turn: _Optional[int] = ...) -> None: ...

class SealGroupRequest(_message.Message):
    __slots__ = ("key", "nonce", "members", "enter_within_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ENTER_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    nonce: bytes
    members: _containers.RepeatedCompositeFieldContainer[SignedDeclaration]
    enter_within_s: float
    def __init__(self, key: _Optional[str] = ..., nonce: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[SignedDeclaration, _Mapping]]] = ..., enter_within_s: _Optional[float] = ...) -> None: ...

class SealGroupResponse(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ...) -> None: ...

class CommitGroupRequest(_message.Message):
    __slots__ = ("key", "nonce")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    key: str
    nonce: bytes
    def __init__(self, key: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ReleaseGroupRequest(_message.Message):
    __slots__ = ("key", "redirect", "redirect_addresses")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_FIELD_NUMBER: _ClassVar[int]
    REDIRECT_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    key: str
    redirect: bytes
    redirect_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., redirect: _Optional[bytes] = ..., redirect_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class PollGroupRequest(_message.Message):
    __slots__ = ("key", "seen", "nonce", "accepted", "reason", "patience_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    seen: int
    nonce: bytes
    accepted: bool
    reason: str
    patience_s: float
    def __init__(self, key: _Optional[str] = ..., seen: _Optional[int] = ..., nonce: _Optional[bytes] = ..., accepted: bool = ..., reason: _Optional[str] = ..., patience_s: _Optional[float] = ...) -> None: ...

class PollGroupResponse(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[GroupMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[GroupMessage, _Mapping]]] = ...) -> None: ...

class GroupMessage(_message.Message):
    __slots__ = ("number", "seal", "commit", "release")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    number: int
    seal: SealGroupRequest
    commit: CommitGroupRequest
    release: ReleaseGroupRequest
    def __init__(self, number: _Optional[int] = ..., seal: _Optional[_Union[SealGroupRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitGroupRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseGroupRequest, _Mapping]] = ...) -> None: ...

class ExchangeHello(_message.Message):
    __slots__ = ("nonce", "chunks", "weight", "check", "seal")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    chunks: int
    weight: float
    check: bool
    seal: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., chunks: _Optional[int] = ..., weight: _Optional[float] = ..., check: bool = ..., seal: _Optional[bytes] = ...) -> None: ...

class ShareHello(_message.Message):
    __slots__ = ("key", "schema_hash", "incarnation", "number", "settled_below", "weight", "chunks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_HASH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BELOW_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    key: str
    schema_hash: bytes
    incarnation: bytes
    number: int
    settled_below: int
    weight: float
    chunks: int
    def __init__(self, key: _Optional[str] = ..., schema_hash: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., number: _Optional[int] = ..., settled_below: _Optional[int] = ..., weight: _Optional[float] = ..., chunks: _Optional[int] = ...) -> None: ...

class ShareAnswer(_message.Message):
    __slots__ = ("taken", "reason")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    reason: str
    def __init__(self, taken: bool = ..., reason: _Optional[str] = ...) -> None: ...

class ShareFateRequest(_message.Message):
    __slots__ = ("key", "incarnation", "number")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    key: str
    incarnation: bytes
    number: int
    def __init__(self, key: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class ShareFateResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: bool = ...) -> None: ...

class AveragingAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
