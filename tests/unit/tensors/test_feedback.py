"""Error feedback: what is held back when, what a checkpoint keeps, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from swarm.errors import SchemaMismatchError
from swarm.tensors.codecs import codec
from swarm.tensors.feedback import ErrorFeedback

INT4 = codec("int4")


def sent(values: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(INT4.encode(values)), dtype=torch.uint8)


def test_a_sender_holds_back_what_its_encoding_left_out_once_it_was_counted() -> None:
    feedback = ErrorFeedback([300])
    values = torch.randn(300, generator=torch.Generator().manual_seed(1))
    first = feedback.compensated(0, 0, values, 2.0)
    assert torch.equal(first, values)
    encoded = sent(first)
    assert not feedback.residual(0, 0, 300).any(), "nothing is held before the answer"
    feedback.counted(0, 0, values, 2.0, INT4, encoded)
    left = values - INT4.decode(bytes(encoded.tolist()), (300,), torch.float32)
    torch.testing.assert_close(feedback.residual(0, 0, 300), 2 * left)
    torch.testing.assert_close(feedback.compensated(0, 0, values, 4.0), values + left / 2)
    torch.testing.assert_close(feedback.compensated(0, 100, values[:50], 2.0), values[:50] + left[100:150])


def test_a_reducer_holds_back_what_the_encoded_average_left_out() -> None:
    feedback = ErrorFeedback([0, 200])
    mean = torch.randn(200, generator=torch.Generator().manual_seed(2))
    before, applied = mean.clone(), mean.bfloat16().float()
    feedback.reduced(1, 0, mean, 10.0, applied)
    torch.testing.assert_close(feedback.residual(1, 0, 200), 10 * (before - applied))
    following = torch.zeros(200)
    feedback.add_to_mean(1, 0, following, 20.0)
    torch.testing.assert_close(following, (before - applied) / 2)
    feedback.reduced(1, 0, following, 20.0, torch.zeros(200))
    torch.testing.assert_close(feedback.residual(1, 0, 200), 10 * (before - applied))


def test_exact_segments_hold_nothing() -> None:
    feedback = ErrorFeedback([0, 7])
    values, mean = torch.ones(5), torch.ones(5)
    assert feedback.nbytes == 28
    assert not feedback.covers(0)
    assert feedback.compensated(0, 3, values, 1.0) is values
    feedback.counted(0, 3, values, 1.0, INT4, sent(values))
    feedback.add_to_mean(0, 3, mean, 1.0)
    feedback.reduced(0, 3, mean, 1.0, torch.zeros(5))
    assert torch.equal(mean, torch.ones(5))
    assert not feedback.residual(1, 0, 7).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_leave_no_trace(bad: float) -> None:
    feedback = ErrorFeedback([256])
    good = torch.linspace(-1, 1, 256)
    feedback.counted(0, 0, good, 1.0, INT4, sent(good))
    held = feedback.residual(0, 0, 256).clone()
    values = good.clone()
    values[3] = bad
    feedback.counted(0, 0, values, 1.0, INT4, sent(values))
    assert torch.equal(feedback.residual(0, 0, 256), held)
    feedback.reduced(0, 0, torch.full((256,), bad), 1.0, torch.zeros(256))
    assert not feedback.residual(0, 0, 256).any()
    feedback.reduced(0, 0, torch.full((256,), 1e300, dtype=torch.float64), 1.0, torch.zeros(256))
    assert not feedback.residual(0, 0, 256).any()


@pytest.mark.parametrize("weight", [1e300, 1e-300, math.inf, 0.0])
def test_weights_that_fp32_cannot_hold_go_without_feedback(weight: float) -> None:
    feedback = ErrorFeedback([256])
    good = torch.linspace(-1, 1, 256)
    feedback.residual(0, 0, 256).fill_(0.5)
    assert feedback.compensated(0, 0, good, weight) is good
    feedback.counted(0, 0, good, weight, INT4, sent(good))
    mean = good.clone()
    feedback.add_to_mean(0, 0, mean, weight)
    assert torch.equal(mean, good)
    feedback.reduced(0, 0, mean, weight, torch.zeros(256))
    assert (feedback.residual(0, 0, 256) == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    feedback = ErrorFeedback([256])
    values = torch.linspace(-1, 1, 256).to(dtype)
    encoded = sent(feedback.compensated(0, 0, values, 1.0))
    feedback.counted(0, 0, values, 1.0, INT4, encoded)
    left = values.float() - INT4.decode(bytes(encoded.tolist()), (256,), torch.float32)
    torch.testing.assert_close(feedback.residual(0, 0, 256), left)
    wide = feedback.compensated(0, 0, values, 1.0)
    assert wide.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_checkpoint_keeps_residuals_of_the_same_layout() -> None:
    feedback = ErrorFeedback([3, 0, 2], b"layout")
    feedback.residual(0, 0, 3).copy_(torch.tensor([1.0, 2.0, 3.0]))
    feedback.residual(2, 0, 2).fill_(4)
    saved = {name: tensor.clone() for name, tensor in feedback.state().items()}
    again = ErrorFeedback([3, 0, 2], b"layout")
    assert again.restore(saved)
    assert again.residual(0, 0, 3).tolist() == [1, 2, 3]
    assert again.residual(2, 0, 2).tolist() == [4, 4]
    for other in (ErrorFeedback([3, 0, 2], b"another"), ErrorFeedback([5], b""), ErrorFeedback([3, 0, 2])):
        other.residual(0, 0, 3).fill_(9)
        assert not other.restore(saved)
        assert not other.residual(0, 0, 3).any()
    assert not again.restore({})
    again.residual(0, 0, 3).fill_(9)
    again.reset()
    assert not again.residual(0, 0, 3).any()


def test_a_checkpoint_that_does_not_fit_its_layout() -> None:
    saved = ErrorFeedback([3], b"layout").state()
    with pytest.raises(SchemaMismatchError, match="sizes"):
        ErrorFeedback([4], b"layout").restore(saved)
    with pytest.raises(SchemaMismatchError, match="sizes"):
        ErrorFeedback([3, 1], b"layout").restore(saved)
    poisoned = {**saved, "residual.0": torch.tensor([1.0, math.nan, 0.0])}
    feedback = ErrorFeedback([3], b"layout")
    with pytest.raises(SchemaMismatchError, match="finite"):
        feedback.restore(poisoned)
    assert not feedback.residual(0, 0, 3).any()
