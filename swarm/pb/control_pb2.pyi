from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ManifestRequest(_message.Message):
    __slots__ = ("known_version",)
    KNOWN_VERSION_FIELD_NUMBER: _ClassVar[int]
    known_version: int
    def __init__(self, known_version: _Optional[int] = ...) -> None: ...

class ManifestReply(_message.Message):
    __slots__ = ("signed_manifest",)
    SIGNED_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    signed_manifest: bytes
    def __init__(self, signed_manifest: _Optional[bytes] = ...) -> None: ...
