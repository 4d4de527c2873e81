from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DhtContact(_message.Message):
    __slots__ = ("peer_id", "addresses")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    peer_id: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer_id: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class DhtRecord(_message.Message):
    __slots__ = ("format", "run", "author", "incarnation", "key", "subkey", "body", "record_version", "ttl_ms", "deleted", "signature", "remaining_ms")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SUBKEY_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    format: int
    run: bytes
    author: bytes
    incarnation: bytes
    key: str
    subkey: str
    body: bytes
    record_version: int
    ttl_ms: int
    deleted: bool
    signature: bytes
    remaining_ms: int
    def __init__(self, format: _Optional[int] = ..., run: _Optional[bytes] = ..., author: _Optional[bytes] = ..., incarnation: _Optional[bytes] = ..., key: _Optional[str] = ..., subkey: _Optional[str] = ..., body: _Optional[bytes] = ..., record_version: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., deleted: bool = ..., signature: _Optional[bytes] = ..., remaining_ms: _Optional[int] = ...) -> None: ...

class DhtPingRequest(_message.Message):
    __slots__ = ("sender",)
    SENDER_FIELD_NUMBER: _ClassVar[int]
    sender: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sender: _Optional[_Iterable[str]] = ...) -> None: ...

class DhtPingResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DhtTarget(_message.Message):
    __slots__ = ("position", "key", "after", "digest", "inline_bytes")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    position: bytes
    key: str
    after: bytes
    digest: bytes
    inline_bytes: int
    def __init__(self, position: _Optional[bytes] = ..., key: _Optional[str] = ..., after: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., inline_bytes: _Optional[int] = ...) -> None: ...

class DhtFindRequest(_message.Message):
    __slots__ = ("sender", "targets", "count")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    sender: _containers.RepeatedScalarFieldContainer[str]
    targets: _containers.RepeatedCompositeFieldContainer[DhtTarget]
    count: int
    def __init__(self, sender: _Optional[_Iterable[str]] = ..., targets: _Optional[_Iterable[_Union[DhtTarget, _Mapping]]] = ..., count: _Optional[int] = ...) -> None: ...

class DhtFound(_message.Message):
    __slots__ = ("nearest", "records", "more", "digest", "remaining_ms")
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    nearest: _containers.RepeatedScalarFieldContainer[int]
    records: _containers.RepeatedCompositeFieldContainer[DhtRecord]
    more: bool
    digest: bytes
    remaining_ms: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nearest: _Optional[_Iterable[int]] = ..., records: _Optional[_Iterable[_Union[DhtRecord, _Mapping]]] = ..., more: bool = ..., digest: _Optional[bytes] = ..., remaining_ms: _Optional[_Iterable[int]] = ...) -> None: ...

class DhtFindResponse(_message.Message):
    __slots__ = ("contacts", "found")
    CONTACTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    contacts: _containers.RepeatedCompositeFieldContainer[DhtContact]
    found: _containers.RepeatedCompositeFieldContainer[DhtFound]
    def __init__(self, contacts: _Optional[_Iterable[_Union[DhtContact, _Mapping]]] = ..., found: _Optional[_Iterable[_Union[DhtFound, _Mapping]]] = ...) -> None: ...

class DhtStoreRequest(_message.Message):
    __slots__ = ("sender", "records", "count", "probe")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    sender: _containers.RepeatedScalarFieldContainer[str]
    records: _containers.RepeatedCompositeFieldContainer[DhtRecord]
    count: int
    probe: bool
    def __init__(self, sender: _Optional[_Iterable[str]] = ..., records: _Optional[_Iterable[_Union[DhtRecord, _Mapping]]] = ..., count: _Optional[int] = ..., probe: bool = ...) -> None: ...

class DhtStored(_message.Message):
    __slots__ = ("status", "record_version", "nearest", "other")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEAREST_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    status: int
    record_version: int
    nearest: _containers.RepeatedScalarFieldContainer[int]
    other: DhtRecord
    def __init__(self, status: _Optional[int] = ..., record_version: _Optional[int] = ..., nearest: _Optional[_Iterable[int]] = ..., other: _Optional[_Union[DhtRecord, _Mapping]] = ...) -> None: ...

class DhtStoreResponse(_message.Message):
    __slots__ = ("contacts", "results")
    CONTACTS_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    contacts: _containers.RepeatedCompositeFieldContainer[DhtContact]
    results: _containers.RepeatedCompositeFieldContainer[DhtStored]
    def __init__(self, contacts: _Optional[_Iterable[_Union[DhtContact, _Mapping]]] = ..., results: _Optional[_Iterable[_Union[DhtStored, _Mapping]]] = ...) -> None: ...
