"""Framing under random tensors, cuts and damage: what is whole arrives, what is not raises typed errors only."""

from __future__ import annotations

import itertools
from typing import Any

import msgpack
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.config import HEADER_SHARE
from swarm.errors import WireError
from swarm.tensors.codecs import CODECS, tensor_bytes
from swarm.tensors.schema import DTYPES
from swarm.tensors.wire import FrameReader, Limits, encode, from_frame, to_frame

SMALL = Limits(max_header_bytes=4096, max_tensors=8, max_payload_bytes=4096)

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
metas = st.dictionaries(st.text(max_size=6), plain, max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    name = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    numel = torch.empty(shape, device="meta").numel()
    seed = draw(st.integers(0, 1 << 30))
    generator = torch.Generator().manual_seed(seed)
    high = 2 if name == "bool" else 256
    raw = torch.randint(0, high, (numel * DTYPES[name].itemsize,), dtype=torch.uint8, generator=generator)
    tensor = raw.view(DTYPES[name]).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor_bytes(tensor.contiguous()))


def feed_cut(data: bytes, cuts: list[int], limits: Limits) -> FrameReader:
    reader = FrameReader(limits)
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        reader.feed(data[start:stop])
    return reader


@settings(deadline=None, max_examples=200)
@given(metas, st.lists(tensors(), max_size=5), st.integers(1, 600), st.lists(st.integers(0, 1 << 16), max_size=6))
def test_round_trip_under_any_cut(meta: dict[str, Any], sent: list[Tensor], chunk_bytes: int, cuts: list[int]) -> None:
    chunks = list(encode(meta, sent, chunk_bytes=chunk_bytes))
    assert max(map(len, chunks)) <= chunk_bytes + chunk_bytes // HEADER_SHARE
    data = b"".join(chunks)
    assert data == to_frame(meta, sent)
    reader = feed_cut(data, cuts, Limits())
    assert reader.meta == meta
    assert [bits(t) for t in reader.tensors()] == [bits(t) for t in sent]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(width=32), max_size=300),
    st.sampled_from([name for name in CODECS if name != "none"]),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.integers(1, 100),
    st.lists(st.integers(0, 1 << 16), max_size=6),
)
def test_lossy_codecs_do_not_depend_on_cuts_and_keep_finiteness(
    values: list[float], codec: str, dtype: torch.dtype, chunk_bytes: int, cuts: list[int]
) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    chunks = list(encode({}, [tensor], codec, chunk_bytes=chunk_bytes))
    received = feed_cut(b"".join(chunks), cuts, Limits()).tensors()[0]
    whole = CODECS[codec].decode(CODECS[codec].encode(tensor), tensor.shape, dtype)
    assert bits(received) == bits(whole)
    if codec in ("fp16", "bf16"):
        assert torch.equal(torch.isfinite(received), torch.isfinite(tensor))
        assert torch.equal(torch.isnan(received), torch.isnan(tensor))
    else:  # NaN takes its block with it, and stays unless `topk` has 64 others to send
        assert not torch.isfinite(received[~torch.isfinite(tensor)]).any() or codec == "topk"
        assert torch.isfinite(received).all() == torch.isfinite(tensor).all()


def survives(data: bytes, cuts: list[int]) -> None:
    """The reader either takes the data as a valid frame within limits, or raises a `WireError`."""
    try:
        received = feed_cut(data, cuts, SMALL).tensors()
    except WireError:
        return
    assert len(received) <= SMALL.max_tensors
    assert sum(t.nbytes for t in received) <= SMALL.max_payload_bytes


@settings(deadline=None, max_examples=500)
@given(
    metas,
    st.lists(tensors(), max_size=3),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=5),
    st.lists(st.integers(0, 1 << 16), max_size=3),
    st.integers(-40, 40),
)
def test_damaged_frames(
    meta: dict[str, Any], sent: list[Tensor], damage: list[tuple[int, int]], cuts: list[int], grow: int
) -> None:
    data = bytearray(to_frame(meta, sent))
    for position, value in damage:
        data[position % len(data)] = value
    data = data + bytes(grow) if grow >= 0 else data[:grow]
    survives(bytes(data), cuts)


rows = st.lists(
    st.lists(
        st.one_of(
            st.sampled_from([*DTYPES, *CODECS]),
            st.lists(st.integers(-2, 1 << 63), max_size=4),
            st.integers(-(1 << 40), 1 << 40),
            plain,
        ),
        max_size=5,
    )
    | plain,
    max_size=10,
)


@settings(deadline=None, max_examples=500)
@given(
    st.one_of(
        plain,
        st.fixed_dictionaries({"meta": plain, "tensors": rows | plain}),
        st.fixed_dictionaries({"meta": metas, "tensors": rows}),
    ),
    st.binary(max_size=64),
)
def test_valid_msgpack_that_is_no_header(header: Any, payload: bytes) -> None:
    packed = msgpack.packb(header)
    survives(b"SWT1" + len(packed).to_bytes(4, "little") + packed + payload, [])


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes(data: bytes, with_prefix: bool) -> None:
    if with_prefix:
        data = b"SWT1" + len(data).to_bytes(4, "little") + data
    survives(data, [3, 7])


@settings(deadline=None, max_examples=100)
@given(st.lists(tensors(), min_size=1, max_size=3), st.integers(1, 1 << 16))
def test_every_proper_prefix_is_incomplete(sent: list[Tensor], lost: int) -> None:
    data = to_frame({}, sent)
    reader = FrameReader()
    reader.feed(data[: len(data) - 1 - lost % len(data)])
    assert not reader.complete


@settings(deadline=None, max_examples=50)
@given(st.lists(tensors(), max_size=3))
def test_reading_twice_gives_independent_memory(sent: list[Tensor]) -> None:
    data = to_frame({}, sent)
    first = from_frame(data)[1]
    for tensor in first:
        tensor.view(torch.uint8).zero_() if tensor.dim() else tensor.zero_()
    assert [bits(t) for t in from_frame(data)[1]] == [bits(t) for t in sent]
