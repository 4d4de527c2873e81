"""Copies and additions of many tensors at once (the CUDA side is in tests/gpu)."""

from __future__ import annotations

import torch

from swarm.tensors.staging import add_all, copy_all


def test_copies_between_dtypes_and_layouts() -> None:
    sources = [torch.randn(3, 4).t(), torch.arange(5.0, dtype=torch.float64), torch.randn(2, requires_grad=True)]
    targets = [torch.empty(4, 3), torch.empty(5, dtype=torch.bfloat16), torch.empty(2)]
    copy_all(zip(targets, sources, strict=True))
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, source.detach().to(target.dtype))
        assert not target.requires_grad


def test_adds_in_place_to_parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    address = parameter.data_ptr()
    add_all([(parameter, torch.tensor([1.0, 2.0, 3.0]))])
    assert parameter.tolist() == [2.0, 3.0, 4.0]
    assert parameter.data_ptr() == address
    assert parameter.grad_fn is None


def test_a_change_may_be_written_again_at_once() -> None:
    change, targets = torch.empty(1), [torch.zeros(1), torch.zeros(1)]

    def changes() -> object:
        for i, target in enumerate(targets):
            yield target, change.fill_(i + 1)

    add_all(changes())  # type: ignore[arg-type]
    assert [float(t) for t in targets] == [1.0, 2.0]
