"""Snapshots without a network: layout, ids, rebuilding, and manifests that lie."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from swarm.errors import FrameTooLargeError, MalformedFrameError, UnsupportedDtypeError, WireError
from swarm.pb import state_pb2 as pb
from swarm.state.snapshot import ALIGNMENT, ChunkManifest, PartialSnapshot, Snapshot, to_ranges
from swarm.tensors.schema import DTYPES
from swarm.tensors.wire import Limits

TENSORS = {
    "weight": torch.arange(2000, dtype=torch.float32).view(40, 50),
    "flag": torch.tensor([True, False, True]),
    "step": torch.tensor(12),
    "empty": torch.empty(0, 3),
    "moment": torch.randn(777, generator=torch.Generator().manual_seed(0)).bfloat16(),
}
CHUNK = 1024


def build(tensors: dict[str, torch.Tensor] = TENSORS, **metadata: Any) -> Snapshot:
    return Snapshot.build(tensors, metadata, chunk_bytes=CHUNK)


def arrived(snapshot: Snapshot, partial: PartialSnapshot | None = None) -> Snapshot:
    """The snapshot as another peer rebuilds it from manifest and chunks."""
    partial = partial or PartialSnapshot()
    partial.begin(ChunkManifest.from_pb(snapshot.manifest.to_pb(), Limits()))
    for index in partial.missing:
        assert partial.place(index, snapshot.chunk(index))
    return partial.to_snapshot()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return list(left) == list(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(left.values(), right.values(), strict=True)
    )


class TestBuild:
    def test_holds_copies(self) -> None:
        tensor = torch.ones(4)
        snapshot = build({"a": tensor})
        tensor.fill_(2)
        assert snapshot.tensors["a"].tolist() == [1, 1, 1, 1]

    def test_keeps_order_shapes_dtypes_values_and_metadata(self) -> None:
        snapshot = build(step=3, note="x", nested={"a": [1, None, 2.5]})
        assert same(snapshot.tensors, TENSORS)
        assert snapshot.metadata == {"step": 3, "note": "x", "nested": {"a": [1, None, 2.5]}}

    @pytest.mark.parametrize("name", DTYPES)
    def test_every_dtype(self, name: str) -> None:
        raw = torch.randint(0, 2, (6, DTYPES[name].itemsize), dtype=torch.uint8, generator=torch.Generator())
        tensor = raw.view(-1).view(DTYPES[name]).view(2, 3)
        result = arrived(build({"pad": torch.ones(1, dtype=torch.uint8), "x": tensor})).tensors["x"]
        assert result.dtype == tensor.dtype
        assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))

    def test_layouts(self) -> None:
        tensor = torch.arange(12.0).view(3, 4).requires_grad_()
        snapshot = build({"t": tensor.t(), "s": tensor[:, ::2], "c": torch.tensor([1 + 2j]).conj()})
        assert torch.equal(snapshot.tensors["t"], tensor.detach().t())
        assert torch.equal(snapshot.tensors["s"], tensor.detach()[:, ::2])
        assert torch.equal(snapshot.tensors["c"], torch.tensor([1 - 2j]))
        assert not snapshot.tensors["t"].requires_grad

    def test_tensors_are_aligned(self) -> None:
        snapshot = build({"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.complex128)})
        assert snapshot.nbytes == ALIGNMENT + 16

    def test_hashing_waits_until_somebody_asks(self) -> None:
        snapshot = build()
        assert not snapshot.is_hashed
        assert len(snapshot.id) == 64
        assert snapshot.is_hashed

    @pytest.mark.parametrize(
        "tensor",
        [torch.ones(2, 2).to_sparse(), torch.empty(2, device="meta"), torch.empty(2, dtype=torch.bits8)],
    )
    def test_tensors_that_cannot_travel(self, tensor: torch.Tensor) -> None:
        with pytest.raises(UnsupportedDtypeError):
            build({"x": tensor})

    @pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}, b"bytes", torch.ones(1)])
    def test_metadata_that_is_not_json(self, value: object) -> None:
        with pytest.raises(ValueError, match=r"JSON|json"):
            build(x=value)

    def test_names_and_chunk_sizes_that_cannot_be(self) -> None:
        with pytest.raises(ValueError, match="512 characters"):
            build({"n" * 513: torch.ones(1)})
        for chunk_bytes in (0, 1023, (4 << 20) + 1):
            with pytest.raises(ValueError, match="chunk_bytes"):
                Snapshot.build(TENSORS, {}, chunk_bytes)


class TestId:
    def test_is_the_same_for_the_same_state(self) -> None:
        clone = {name: tensor.clone() for name, tensor in TENSORS.items()}
        assert build(step=1, lr=0.1).id == build(clone, lr=0.1, step=1).id

    def test_does_not_depend_on_what_was_in_memory_before(self) -> None:
        tensors = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.uint8)}
        ids = set()
        for _ in range(3):
            torch.full((128,), 255, dtype=torch.uint8)  # leave other bytes in freed memory
            ids.add(build(tensors).id)
        assert len(ids) == 1

    def test_differs_by_value_name_shape_dtype_order_metadata_and_chunk_size(self) -> None:
        a, b = torch.zeros(2, 3), torch.zeros(1)
        variants = [
            build({"a": a, "b": b}),
            build({"a": a + 1, "b": b}),
            build({"a": a, "c": b}),
            build({"b": b, "a": a}),
            build({"a": a.view(3, 2), "b": b}),
            build({"a": a.int(), "b": b}),
            build({"a": a, "b": b}, step=1),
            build({}),
            Snapshot.build({"a": a, "b": b}, {}, 2048),
        ]
        assert len({v.id for v in variants}) == len(variants)

    def test_covers_the_chunk_hashes(self) -> None:
        manifest = build().manifest
        first = hashlib.sha256(build().chunk(0)).digest()
        assert manifest.chunk_hash(0) == first
        changed = ChunkManifest(manifest.layout, manifest.metadata_json, CHUNK, bytes(len(manifest.chunk_hashes)))
        assert changed.id != manifest.id


class TestArrival:
    def test_rebuilds_everything(self) -> None:
        snapshot = build(step=5)
        result = arrived(snapshot)
        assert same(result.tensors, TENSORS)
        assert result.metadata == {"step": 5}
        assert result.id == snapshot.id
        assert result.is_hashed
        result.tensors["weight"].add_(1)

    def test_of_nothing(self) -> None:
        result = arrived(build({}))
        assert result.tensors == {}
        assert result.nbytes == 0

    def test_chunks_in_any_order(self) -> None:
        snapshot = build()
        partial = PartialSnapshot()
        partial.begin(snapshot.manifest)
        for index in reversed(partial.missing):
            assert partial.place(index, snapshot.chunk(index))
        assert same(partial.to_snapshot().tensors, TENSORS)

    def test_counts_what_is_verified(self) -> None:
        snapshot = build()
        partial = PartialSnapshot()
        assert (partial.done_bytes, partial.total_bytes, partial.missing) == (0, 0, [])
        partial.begin(snapshot.manifest)
        assert partial.total_bytes == snapshot.nbytes
        last = snapshot.manifest.chunk_count - 1
        partial.place(last, snapshot.chunk(last))
        partial.place(last, snapshot.chunk(last))
        assert partial.done_bytes == snapshot.nbytes - last * CHUNK
        assert partial.missing == list(range(last))

    @pytest.mark.parametrize(
        "spoil", [lambda c: b"x" + c[1:], lambda c: c[:-1], lambda c: c + b"x", lambda _: b"", lambda c: c[::-1]]
    )
    def test_a_wrong_chunk_changes_nothing(self, spoil: Any) -> None:
        snapshot = build()
        partial = PartialSnapshot()
        partial.begin(snapshot.manifest)
        assert not partial.place(1, spoil(snapshot.chunk(1)))
        assert 1 in partial.missing
        assert partial.done_bytes == 0

    def test_the_same_snapshot_is_resumed(self) -> None:
        snapshot = build()
        partial = PartialSnapshot()
        partial.begin(snapshot.manifest)
        partial.place(2, snapshot.chunk(2))
        partial.begin(build().manifest)
        assert partial.done_bytes == CHUNK
        assert 2 not in partial.missing
        assert same(arrived(snapshot, partial).tensors, TENSORS)

    def test_a_newer_snapshot_keeps_chunks_that_did_not_change(self) -> None:
        older = build(step=1)
        partial = PartialSnapshot()
        partial.begin(older.manifest)
        for index in (0, 1, 2):
            partial.place(index, older.chunk(index))
        changed = {**TENSORS, "weight": TENSORS["weight"].clone()}
        changed["weight"].view(-1)[300] += 1  # in chunk 1
        newer = build(changed, step=2)
        partial.begin(newer.manifest)
        assert partial.done_bytes == 2 * CHUNK
        assert partial.missing[0] == 1
        result = arrived(newer, partial)
        assert same(result.tensors, changed)
        assert result.metadata == {"step": 2}

    def test_another_snapshot_starts_anew(self) -> None:
        older = build()
        partial = PartialSnapshot()
        partial.begin(older.manifest)
        partial.place(0, older.chunk(0))
        newer = build({"other": torch.ones(700)})
        partial.begin(newer.manifest)
        assert partial.done_bytes == 0
        assert same(arrived(newer, partial).tensors, {"other": torch.ones(700)})

    def test_a_finished_partial_can_be_used_again(self) -> None:
        partial = PartialSnapshot()
        first = arrived(build(), partial)
        second = arrived(build(), partial)
        first.tensors["weight"].zero_()
        assert same(second.tensors, TENSORS)

    def test_bool_bytes_other_than_0_and_1_are_refused(self) -> None:
        snapshot = build({"flag": torch.tensor([2, 1, 0], dtype=torch.uint8)})
        layout = build({"flag": torch.zeros(3, dtype=torch.bool)}).manifest.layout
        partial = PartialSnapshot()
        partial.begin(ChunkManifest(layout, b"{}", CHUNK, snapshot.manifest.chunk_hashes))
        assert partial.place(0, snapshot.chunk(0))
        with pytest.raises(MalformedFrameError, match="bool"):
            partial.to_snapshot()


def lie(**changes: Any) -> pb.SnapshotManifest:
    """The manifest of a good snapshot with changed fields and, where it can be had, a matching id."""
    message = build(step=1).manifest.to_pb()
    for name, value in changes.items():
        if name == "tensors":
            del message.tensors[:]
            message.tensors.extend(value)
        else:
            setattr(message, name, value)
    return message


def entry(name: str = "a", dtype: str = "float32", shape: tuple[int, ...] = (1,)) -> pb.TensorEntry:
    return pb.TensorEntry(name=name, dtype=dtype, shape=shape)


class TestManifestsThatLie:
    def test_the_one_that_the_cases_vary_is_good(self) -> None:
        assert ChunkManifest.from_pb(lie(), Limits()).id == build(step=1).manifest.id

    @pytest.mark.parametrize(
        ("message", "error"),
        [
            (lie(id=bytes(32)), MalformedFrameError),
            (lie(id=b""), MalformedFrameError),
            (lie(metadata_json=b'{"step":2}'), MalformedFrameError),
            (lie(chunk_bytes=0), MalformedFrameError),
            (lie(chunk_bytes=1 << 30), MalformedFrameError),
            (lie(chunk_bytes=2048), MalformedFrameError),
            (lie(chunk_hashes=b""), MalformedFrameError),
            (lie(chunk_hashes=bytes(33)), MalformedFrameError),
            (lie(tensors=[entry(), entry()]), MalformedFrameError),
            (lie(tensors=[entry(name="n" * 600)]), MalformedFrameError),
            (lie(tensors=[entry(dtype="float3")]), UnsupportedDtypeError),
            (lie(tensors=[entry(shape=(1,) * 65)]), MalformedFrameError),
            (lie(tensors=[entry(shape=(0, 1 << 63, 1 << 63))]), MalformedFrameError),
            (lie(tensors=[entry(shape=(1 << 40,))]), FrameTooLargeError),
            (lie(tensors=[entry(str(i)) for i in range(5000)]), FrameTooLargeError),
            (lie(metadata_json=b"x" * ((1 << 20) + 1)), FrameTooLargeError),
            (pb.SnapshotManifest(), MalformedFrameError),
        ],
    )
    def test_are_refused(self, message: pb.SnapshotManifest, error: type[WireError]) -> None:
        with pytest.raises(error):
            ChunkManifest.from_pb(message, Limits())

    @pytest.mark.parametrize("metadata", [b"", b"[1]", b"{", b'{"x":NaN}', b"\xff", b"[" * 100_000])
    def test_metadata_that_is_no_json_object(self, metadata: bytes) -> None:
        good = build().manifest
        message = ChunkManifest(good.layout, metadata, CHUNK, good.chunk_hashes).to_pb()
        with pytest.raises(MalformedFrameError, match="metadata"):
            ChunkManifest.from_pb(message, Limits())

    def test_nothing_is_allocated_for_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(_: int) -> torch.Tensor:
            raise AssertionError("allocated before the limits were checked")

        message = lie()
        monkeypatch.setattr("swarm.state.snapshot.allocate", forbidden)
        with pytest.raises(FrameTooLargeError, match="at most 100 are accepted"):
            ChunkManifest.from_pb(message, Limits(max_payload_bytes=100))


def test_ranges() -> None:
    assert [(r.first, r.count) for r in to_ranges([0, 1, 2, 5, 7, 8])] == [(0, 3), (5, 1), (7, 2)]
    assert to_ranges([]) == []
