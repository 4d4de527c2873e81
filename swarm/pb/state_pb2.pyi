from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SnapshotRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class TensorEntry(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotManifest(_message.Message):
    __slots__ = ("id", "tensors", "metadata_json", "chunk_bytes", "chunk_hashes")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_HASHES_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    tensors: _containers.RepeatedCompositeFieldContainer[TensorEntry]
    metadata_json: bytes
    chunk_bytes: int
    chunk_hashes: bytes
    def __init__(self, id: _Optional[bytes] = ..., tensors: _Optional[_Iterable[_Union[TensorEntry, _Mapping]]] = ..., metadata_json: _Optional[bytes] = ..., chunk_bytes: _Optional[int] = ..., chunk_hashes: _Optional[bytes] = ...) -> None: ...

class ChunkRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ChunksRequest(_message.Message):
    __slots__ = ("snapshot_id", "ranges")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[ChunkRange]
    def __init__(self, snapshot_id: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[ChunkRange, _Mapping]]] = ...) -> None: ...
