"""Dtype names, schema hashes and finite checks."""

from __future__ import annotations

import pytest
import torch

from swarm.errors import NonFiniteError, SchemaMismatchError, UnsupportedDtypeError
from swarm.tensors.schema import (
    DTYPES,
    TensorMeta,
    check_finite,
    check_schema,
    dtype_name,
    is_finite,
    parse_dtype,
    schema_hash,
)


def test_names_round_trip() -> None:
    for name, dtype in DTYPES.items():
        assert dtype_name(dtype) == name
        assert parse_dtype(name) is dtype


@pytest.mark.parametrize("name", ["float", "load", "", None, 4, b"float32"])
def test_unknown_names(name: object) -> None:
    with pytest.raises(UnsupportedDtypeError):
        parse_dtype(name)


def test_dtypes_that_cannot_travel() -> None:
    with pytest.raises(UnsupportedDtypeError, match="complex32"):
        dtype_name(torch.complex32)


def test_meta() -> None:
    meta = TensorMeta.of(torch.empty(2, 3, dtype=torch.float16))
    assert meta == TensorMeta((2, 3), torch.float16)
    assert (meta.numel, meta.nbytes, str(meta)) == (6, 12, "float16[2, 3]")
    assert TensorMeta((), torch.int64).nbytes == 8


class TestSchemaHash:
    def test_depends_on_what_the_tensors_are_and_not_on_their_values(self) -> None:
        first = schema_hash({"a": torch.zeros(2, 3), "b": torch.zeros(1)})
        assert len(first) == 32
        assert first == schema_hash({"a": torch.ones(2, 3), "b": TensorMeta((1,), torch.float32)})

    def test_differs_by_name_shape_dtype_and_order(self) -> None:
        a, b = torch.zeros(2, 3), torch.zeros(1)
        variants = [
            {"a": a, "b": b},
            {"a": a, "c": b},
            {"b": b, "a": a},
            {"a": a.view(3, 2), "b": b},
            {"a": a.view(6), "b": b},
            {"a": a.half(), "b": b},
            {"a": a},
            {},
        ]
        assert len({schema_hash(v) for v in variants}) == len(variants)

    def test_of_a_sequence_counts_positions(self) -> None:
        assert schema_hash([torch.zeros(2)]) == schema_hash({"0": torch.zeros(2)})
        assert schema_hash([torch.zeros(2)]) != schema_hash([torch.zeros(2)] * 2)

    def test_refuses_dtypes_that_cannot_travel(self) -> None:
        with pytest.raises(UnsupportedDtypeError):
            schema_hash([TensorMeta((1,), torch.complex32)])


class TestCheckSchema:
    expected = (TensorMeta((2,), torch.float32), TensorMeta((), torch.int64))

    def test_accepts_the_same(self) -> None:
        check_schema("The inputs", [torch.zeros(2), torch.tensor(1)], self.expected)

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ([torch.zeros(2)], "1 tensors where 2"),
            ([torch.zeros(3), torch.tensor(1)], r"tensor 0 is float32\[3\] where float32\[2\]"),
            ([torch.zeros(2), torch.tensor(1.0)], r"tensor 1 is float32\[\] where int64\[\]"),
        ],
    )
    def test_names_the_difference(self, tensors: list[torch.Tensor], message: str) -> None:
        with pytest.raises(SchemaMismatchError, match=message):
            check_schema("The inputs", tensors, self.expected)


FLOATS = [d for d in DTYPES.values() if d.is_floating_point and d is not getattr(torch, "float8_e8m0fnu", None)]


class TestFinite:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_finite_values_of_any_size(self, dtype: torch.dtype) -> None:
        assert is_finite(torch.tensor([0.0, -1.5, 3.0]).to(dtype))
        assert is_finite(torch.empty(0, dtype=dtype))
        assert is_finite(torch.tensor(1.0).to(dtype))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nan_is_found_anywhere(self, dtype: torch.dtype) -> None:
        for position in (0, 500, 999):
            tensor = torch.ones(1000)
            tensor[position] = float("nan")
            assert not is_finite(tensor.to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
    @pytest.mark.parametrize("value", [float("inf"), float("-inf")])
    def test_infinity_is_found(self, dtype: torch.dtype, value: float) -> None:
        tensor = torch.ones(7)
        tensor[3] = value
        assert not is_finite(tensor.to(dtype))

    def test_opposite_infinities_do_not_cancel(self) -> None:
        assert not is_finite(torch.tensor([float("inf"), float("-inf")]))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_large_values_whose_sum_overflows_are_finite(self, dtype: torch.dtype) -> None:
        assert is_finite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype))

    def test_complex_and_integers(self) -> None:
        assert is_finite(torch.tensor([1 + 2j]))
        assert not is_finite(torch.tensor([complex(1, float("nan"))]))
        assert not is_finite(torch.tensor([complex(float("inf"), 0)]).conj())
        assert is_finite(torch.tensor([1 << 62]))
        assert is_finite(torch.tensor([True]))

    def test_layouts_and_graphs(self) -> None:
        tensor = torch.ones(4, 4, requires_grad=True)
        assert is_finite(tensor.t()[::2])
        assert is_finite(torch.ones(1).expand(5))

    def test_check_names_what_it_is(self) -> None:
        check_finite(torch.ones(2), "gradient")
        with pytest.raises(NonFiniteError, match=r"The gradient of ffn\.0\.1 holds NaN or infinity"):
            check_finite(torch.tensor([float("nan")]), "gradient of ffn.0.1")
