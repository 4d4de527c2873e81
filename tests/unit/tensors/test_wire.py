"""Framing: what is sent arrives, for every dtype and every cut; what is wrong is refused with a typed error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from swarm.config import HEADER_SHARE
from swarm.errors import (
    FrameTooLargeError,
    HostBusyError,
    MalformedFrameError,
    TruncatedStreamError,
    UnsupportedDtypeError,
    WireError,
)
from swarm.tensors.codecs import tensor_bytes
from swarm.tensors.schema import DTYPES
from swarm.tensors.wire import FrameReader, Limits, encode, from_frame, to_frame

META = {"v": 1, "parts": [{"uid": "ffn.0.1", "request_id": b"r" * 16}], "scale": 1.5, "none": None}


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 1)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    nbytes = torch.empty(shape, device="meta").numel() * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bytes(tensor_bytes(left.contiguous())) == bytes(tensor_bytes(right.contiguous()))


def read(chunks: list[bytes], limits: Limits | None = None) -> tuple[dict[str, Any], list[Tensor]]:
    reader = FrameReader(limits or Limits())
    for chunk in chunks:
        reader.feed(chunk)
    return reader.meta, reader.tensors()


def frame(header: Any, payload: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<4sI", b"SWT1", len(packed)) + packed + payload


def row(dtype: Any = "float32", shape: Any = (2, 3), codec: Any = "none", nbytes: Any = 24) -> list[Any]:
    return [dtype, shape, codec, nbytes]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("chunk_bytes", [1, 13, 1 << 20])
def test_every_dtype_and_shape_arrives_bit_for_bit(name: str, chunk_bytes: int) -> None:
    dtype = DTYPES[name]
    sent = [random_tensor(shape, dtype) for shape in [(), (1,), (0,), (3, 0, 2), (5, 3), (2, 2, 2, 2)]]
    meta, received = read(list(encode(META, sent, chunk_bytes=chunk_bytes)))
    assert meta == META
    assert len(received) == len(sent)
    assert all(same_bits(a, b) for a, b in zip(sent, received, strict=True))


def test_the_table_of_dtypes_is_what_torch_trains_with() -> None:
    wanted = "float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2 complex64 complex128 bool"
    integers = "uint8 int8 int16 int32 int64 uint16 uint32 uint64"
    assert set(f"{wanted} {integers}".split()) <= set(DTYPES)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[1:, 1:],
        lambda t: t.unsqueeze(0).expand(3, -1, -1),
        lambda t: t.flip(0),
        lambda t: t[0, 0],
    ],
)
@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_layouts_that_are_not_contiguous(make: Any, codec: str) -> None:
    tensor = make(torch.arange(35, dtype=torch.float32).view(5, 7))
    _, [received] = from_frame(to_frame({}, [tensor], codec))
    assert torch.equal(received, tensor)


def test_lazily_conjugated_and_negated_tensors_are_resolved() -> None:
    base = torch.tensor([1 + 2j, -3 + 0.5j])
    assert base.conj().is_conj()
    _, [conjugate, negative] = from_frame(to_frame({}, [base.conj(), base.conj().imag]))
    assert torch.equal(conjugate, base.conj())
    assert torch.equal(negative, torch.tensor([-2.0, -0.5]))


def test_parameters_and_tensors_that_require_grad_travel_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    _, [received, result] = from_frame(to_frame({}, [parameter, parameter * 2]))
    assert not received.requires_grad
    assert torch.equal(result, torch.full((3,), 2.0))


def test_received_tensors_are_writable_and_independent() -> None:
    data = to_frame({}, [torch.zeros(4), torch.zeros(4)])
    _, [first, second] = from_frame(data)
    first.fill_(7)
    assert torch.equal(second, torch.zeros(4))
    assert torch.equal(from_frame(data)[1][0], torch.zeros(4))


def test_small_frames_are_one_message_and_large_ones_start_with_the_header() -> None:
    assert len(list(encode(META, [torch.ones(16)], chunk_bytes=4096))) == 1
    chunks = list(encode(META, [torch.ones(5000), torch.ones(3)], chunk_bytes=4096))
    reader = FrameReader()
    reader.feed(chunks[0])
    assert reader.has_header
    assert reader.payload_bytes == 20012
    assert [len(c) for c in chunks[1:]] == [4096, 4096, 4096, 20012 - 4 * 4096]
    assert 4096 < len(chunks[0]) <= 4096 + 4096 // HEADER_SHARE


def test_a_header_that_is_large_for_a_message_travels_alone() -> None:
    chunks = list(encode({"text": "x" * 300}, [torch.ones(1024)], chunk_bytes=4096))
    assert len(chunks) == 2
    assert len(chunks[0]) > 4096 // HEADER_SHARE
    assert len(chunks[1]) == 4096


def test_no_message_is_empty_where_payload_and_messages_end_together() -> None:
    chunks = list(encode({}, [torch.ones(1024), torch.ones(1024), torch.empty(0)], chunk_bytes=4096))
    assert [len(c) for c in chunks[1:]] == [4096]


def test_a_header_beyond_the_message_size_is_cut_too() -> None:
    chunks = list(encode({"text": "x" * 5000}, [torch.ones(2)], chunk_bytes=1024))
    assert max(map(len, chunks)) <= 1024
    meta, [received] = read(chunks)
    assert meta == {"text": "x" * 5000}
    assert torch.equal(received, torch.ones(2))


def test_a_frame_without_tensors_is_complete_with_its_header() -> None:
    reader = FrameReader()
    assert not reader.complete
    reader.feed(to_frame(META, []))
    assert reader.complete
    assert reader.tensors() == []


def test_encoding_is_lazy_and_reads_each_chunk_when_asked() -> None:
    tensor = torch.zeros(4096)
    chunks = encode({}, [tensor], chunk_bytes=4096)
    collected = [next(chunks)]
    tensor.fill_(1)
    _, [received] = read(collected + list(chunks))
    assert received[:1024].sum() == 0
    assert received[1024:].sum() == 3072


def test_codecs_by_tensor() -> None:
    floats, indexes = torch.tensor([1.00048828125, 3.0]), torch.tensor([1, 2])
    _, received = from_frame(to_frame({}, [floats, indexes, floats], ["fp16", "none", "bf16"]))
    assert [t.dtype for t in received] == [torch.float32, torch.int64, torch.float32]
    assert torch.equal(received[0], floats.half().float())
    assert torch.equal(received[1], indexes)
    assert torch.equal(received[2], floats.bfloat16().float())


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_large_converted_tensors_are_decoded_in_windows(codec: str, chunk_bytes: int) -> None:
    tensor = torch.randn(600_001, generator=torch.Generator().manual_seed(0))
    reader = FrameReader()
    for chunk in encode({}, [tensor, torch.ones(3)], codec, chunk_bytes=chunk_bytes):
        reader.feed(chunk)
    assert reader.converts
    half = torch.float16 if codec == "fp16" else torch.bfloat16
    assert torch.equal(reader.tensors()[0], tensor.to(half).float())
    assert torch.equal(reader.tensors()[1], torch.ones(3))


def test_large_tensors_on_huge_pages_arrive() -> None:
    tensor = torch.arange(3 << 20, dtype=torch.float32)
    _, [received] = read(list(encode({}, [tensor])))
    assert torch.equal(received, tensor)


class TestRefusedToSend:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.ones(2, 2).to_sparse(),
            torch.empty(2, device="meta"),
            torch.empty(2, dtype=torch.bits8),
        ],
    )
    def test_tensors_that_cannot_travel(self, tensor: Tensor) -> None:
        with pytest.raises(UnsupportedDtypeError):
            encode({}, [tensor])

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
    def test_codec_and_dtype_that_do_not_go_together(self, dtype: torch.dtype) -> None:
        with pytest.raises(UnsupportedDtypeError, match="fp16 cannot carry"):
            to_frame({}, [torch.zeros(2).to(dtype)], "fp16")

    def test_unknown_codec_and_wrong_number_of_codecs(self) -> None:
        with pytest.raises(UnsupportedDtypeError, match="unknown"):
            encode({}, [torch.ones(1)], "zip")
        with pytest.raises(ValueError, match="1 codecs for 2 tensors"):
            encode({}, [torch.ones(1)] * 2, ["none"])

    @pytest.mark.parametrize("value", [object(), 1 << 70, {1, 2}])
    def test_metadata_that_msgpack_cannot_carry(self, value: Any) -> None:
        with pytest.raises(MalformedFrameError, match="metadata"):
            to_frame({"x": value}, [])


BAD_HEADERS = {
    "not msgpack": b"\xc1",
    "cut msgpack": msgpack.packb({"meta": {}, "tensors": []})[:-1],
    "two objects": msgpack.packb({"meta": {}, "tensors": []}) * 2,
    "empty": b"",
    "not a map": [1],
    "a field missing": {"meta": {}},
    "a field too many": {"meta": {}, "tensors": [], "x": 1},
    "meta no map": {"meta": [], "tensors": []},
    "tensors no list": {"meta": {}, "tensors": {}},
    "row no list": {"meta": {}, "tensors": [3]},
    "row too short": {"meta": {}, "tensors": [["float32", [2], "none"]]},
    "row too long": {"meta": {}, "tensors": [[*row(), 1]]},
    "shape no list": {"meta": {}, "tensors": [row(shape=6)]},
    "shape of text": {"meta": {}, "tensors": [row(shape=["2", 3])]},
    "shape of float": {"meta": {}, "tensors": [row(shape=[2.0, 3])]},
    "shape of bool": {"meta": {}, "tensors": [row(shape=[True, 6])]},
    "negative size": {"meta": {}, "tensors": [row(shape=[-2, -3])]},
    "too many dims": {"meta": {}, "tensors": [row(shape=[1] * 65, nbytes=4)]},
    "absurd size": {"meta": {}, "tensors": [row(shape=[0, 1 << 63], nbytes=0)]},
    "absurd product": {"meta": {}, "tensors": [row(shape=[0, 1 << 40, 1 << 40], nbytes=0)]},
    "size too small": {"meta": {}, "tensors": [row(nbytes=23)]},
    "size too large": {"meta": {}, "tensors": [row(nbytes=25)]},
    "size negative": {"meta": {}, "tensors": [row(nbytes=-24)]},
    "size no int": {"meta": {}, "tensors": [row(nbytes=24.0)]},
    "size a bool": {"meta": {}, "tensors": [row(dtype="uint8", shape=[1], nbytes=True)]},
    "extension": {"meta": {"x": msgpack.ExtType(5, b"data")}, "tensors": []},
    "key neither text nor bytes": {"meta": {3: 4}, "tensors": []},
    "invalid text": b"\x82\xa4meta\x80\xa7tensors\x91\xa2\xff\xff",
    "nested beyond reason": b"\x82\xa7tensors\x90\xa4meta\x81\xa1x" + b"\x91" * 5000 + b"\x90",
    "list longer than the header": b"\x82\xa4meta\x80\xa7tensors\xdd\x7f\xff\xff\xff",
}
BAD_DTYPES = {
    "dtype unknown": row(dtype="float128"),
    "dtype no text": row(dtype=3),
    "dtype an attribute of torch": row(dtype="load"),
    "codec unknown": row(codec="zip"),
    "codec no text": row(codec=None),
    "codec does not fit": row(dtype="int32", codec="fp16", nbytes=12),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_malformed_headers_are_refused(case: str) -> None:
    with pytest.raises(MalformedFrameError):
        from_frame(frame(BAD_HEADERS[case], b"\0" * 24))


@pytest.mark.parametrize("case", BAD_DTYPES)
def test_unknown_dtypes_and_codecs_are_refused(case: str) -> None:
    with pytest.raises(UnsupportedDtypeError):
        from_frame(frame({"meta": {}, "tensors": [BAD_DTYPES[case]]}, b"\0" * 24))


def test_the_header_that_the_cases_vary_is_valid() -> None:
    _, [tensor] = from_frame(frame({"meta": {}, "tensors": [row()]}, b"\0" * 24))
    assert torch.equal(tensor, torch.zeros(2, 3))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"SWT2" + b"\0" * 8])
def test_garbage_is_refused_at_its_first_wrong_byte(data: bytes) -> None:
    with pytest.raises(MalformedFrameError, match="first bytes"):
        FrameReader().feed(data)
    wrong = next(i for i, byte in enumerate(data) if byte != b"SWT1"[i])
    reader = FrameReader()
    for i in range(wrong):
        reader.feed(data[i : i + 1])
    with pytest.raises(MalformedFrameError, match="first bytes"):
        reader.feed(data[wrong : wrong + 1])


class TestLimits:
    def test_header(self) -> None:
        reader = FrameReader(Limits(max_header_bytes=100))
        with pytest.raises(FrameTooLargeError, match="header of 101 bytes"):
            reader.feed(struct.pack("<4sI", b"SWT1", 101))
        with pytest.raises(FrameTooLargeError):
            FrameReader().feed(struct.pack("<4sI", b"SWT1", 0xFFFFFFFF))

    def test_number_of_tensors(self) -> None:
        data = to_frame({}, [torch.empty(0)] * 5)
        assert len(from_frame(data, Limits(max_tensors=5))[1]) == 5
        with pytest.raises(FrameTooLargeError, match="5 tensors"):
            from_frame(data, Limits(max_tensors=4))

    def test_payload_is_bounded_over_all_tensors(self) -> None:
        data = to_frame({}, [torch.ones(4)] * 3)
        assert len(from_frame(data, Limits(max_payload_bytes=48))[1]) == 3
        with pytest.raises(FrameTooLargeError, match="48 bytes or more"):
            from_frame(data, Limits(max_payload_bytes=47))

    def test_decoded_size_counts_where_it_is_the_larger(self) -> None:
        data = to_frame({}, [torch.ones(4)], "fp16")
        with pytest.raises(FrameTooLargeError):
            from_frame(data, Limits(max_payload_bytes=15))
        assert len(from_frame(data, Limits(max_payload_bytes=16))[1]) == 1

    def test_a_huge_announcement_allocates_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(*_: Any, **__: Any) -> Tensor:
            raise AssertionError("allocated before the limits were checked")

        monkeypatch.setattr("swarm.tensors.wire.allocate", forbidden)
        header = {"meta": {}, "tensors": [row(), row(shape=[1 << 40], nbytes=4 << 40)]}
        with pytest.raises(FrameTooLargeError):
            FrameReader().feed(frame(header))

    def test_memory_of_a_tensor_waits_for_its_turn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        allocated: list[int] = []

        def counted(nbytes: int) -> Tensor:
            allocated.append(nbytes)
            return torch.empty(nbytes, dtype=torch.uint8)

        monkeypatch.setattr("swarm.tensors.wire.allocate", counted)
        data = to_frame({}, [torch.ones(4), torch.ones(100)])
        reader = FrameReader()
        reader.feed(data[:-402])
        assert allocated == [16]
        reader.feed(data[-402:])
        assert allocated == [16, 400]


class TestTruncation:
    @pytest.mark.parametrize("lost", [1, 15, 16, 17, 40])
    def test_every_cut_is_noticed(self, lost: int) -> None:
        data = to_frame({"a": 1}, [torch.ones(4)])
        reader = FrameReader()
        reader.feed(data[:-lost])
        assert not reader.complete
        with pytest.raises(TruncatedStreamError):
            reader.finish()
        with pytest.raises(TruncatedStreamError):
            reader.tensors()

    def test_metadata_before_the_header(self) -> None:
        with pytest.raises(TruncatedStreamError, match="before the header"):
            _ = FrameReader().meta

    def test_a_truncated_single_message(self) -> None:
        with pytest.raises(TruncatedStreamError, match="0 of 1"):
            from_frame(to_frame({}, [torch.ones(4)])[:-1])


class TestTrailingBytes:
    def test_in_the_same_message(self) -> None:
        with pytest.raises(MalformedFrameError, match="3 bytes follow"):
            from_frame(to_frame({}, [torch.ones(4)]) + b"abc")

    def test_in_a_later_message(self) -> None:
        reader = FrameReader()
        reader.feed(to_frame({}, []))
        reader.feed(b"")
        with pytest.raises(MalformedFrameError, match="follow"):
            reader.feed(b"x")
        assert not reader.complete


def test_a_reader_that_failed_stays_failed() -> None:
    reader = FrameReader()
    with pytest.raises(MalformedFrameError):
        reader.feed(b"garbage!")
    with pytest.raises(WireError):
        reader.feed(to_frame({}, []))
    with pytest.raises(WireError):
        reader.tensors()


def test_bool_bytes_other_than_0_and_1_are_refused() -> None:
    header = {"meta": {}, "tensors": [row(dtype="bool", shape=[3], nbytes=3)]}
    assert from_frame(frame(header, b"\0\1\0"))[1][0].tolist() == [False, True, False]
    with pytest.raises(MalformedFrameError, match="bool"):
        from_frame(frame(header, b"\0\2\0"))


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_expanded_tensors_travel_as_what_they_look_like(codec: str) -> None:
    for tensor in (torch.ones(1).expand(3, 2), torch.arange(2.0).expand(3, 2), torch.arange(3.0)[:, None].expand(3, 2)):
        _, [back] = from_frame(to_frame({}, [tensor], codec))
        assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 4),
        torch.tensor(2.5),
        torch.ones(3, requires_grad=True),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(()).expand(4),
        torch.complex(torch.ones(2), torch.ones(2)).conj().imag,  # lazily negated
        torch.tensor([True, False]),
        torch.arange(4, dtype=torch.bfloat16),
        torch.empty(0, 3),
    ],
)
def test_single_messages_of_any_kind_of_tensor(tensor: torch.Tensor) -> None:
    meta, received = from_frame(to_frame(META, [tensor, torch.ones(2)]))
    assert meta == META
    assert torch.equal(received[0], tensor.detach())
    assert received[0].shape == tensor.shape
    assert received[0].dtype == tensor.dtype
    received[1] += 1  # writable, and in memory of its own
    assert received[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "change", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:6], lambda d: b"", lambda d: d[:20]]
)
def test_single_messages_of_the_wrong_size_are_refused(change: Callable[[bytes], bytes]) -> None:
    with pytest.raises(WireError):
        from_frame(change(to_frame(META, [torch.ones(4)])))


@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_a_frame_can_be_refused_by_its_size_before_memory_is_allocated(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def admit(nbytes: int) -> None:
        asked.append(nbytes)
        raise HostBusyError("Full.")

    def allocate(nbytes: int) -> Tensor:
        raise AssertionError("memory was allocated")

    data = to_frame({}, [torch.zeros(3, 4), torch.zeros(5)], codec)
    monkeypatch.setattr("swarm.tensors.wire.allocate", allocate)
    reader = FrameReader(admit=admit)
    for _ in range(2):
        with pytest.raises(HostBusyError):
            reader.feed(data)
    with pytest.raises(HostBusyError):
        from_frame(data, admit=admit)
    assert asked == [68, 68]
