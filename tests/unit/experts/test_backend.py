"""One expert on a device: batches, gradients, failures of single requests; and its state as a snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarm.errors import (
    ExpertFailedError,
    NonFiniteError,
    SchemaMismatchError,
    StaleRequestError,
)
from swarm.experts.backend import (
    KEEP_GRAPH_TOKENS,
    BackwardJob,
    BackwardResult,
    CompileFailed,
    ComputeOptions,
    ExpertBackend,
    ForwardJob,
    ForwardResult,
)
from swarm.experts.layers import FeedForward
from swarm.experts.optimizing import MAX_GRADIENT_NORM
from swarm.experts.registry import build_expert
from swarm.experts.replicas import capture, restore
from swarm.experts.spec import ExpertGrid, OptimizerSpec, TensorSpec, expert, registered
from swarm.identity import PeerId
from swarm.state.transfer import Snapshot

RUN, PEER, HID = bytes(32), PeerId(bytes(32)), 6
LIAR = PeerId(b"l" * 32)


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def grid(module: str = "ffn", optimizer: OptimizerSpec | None = None, **config: Any) -> ExpertGrid:
    return ExpertGrid(
        "a.[0:2]", module, config={"hid": HID, **config}, optimizer=optimizer or OptimizerSpec("sgd", lr=0.1)
    )


def backend(*args: Any, **kwargs: Any) -> ExpertBackend:
    return ExpertBackend(grid(*args, **kwargs), "a.0", RUN)


_numbers = iter(range(1, 1 << 30))


def rid() -> bytes:
    return b"noncenon" + next(_numbers).to_bytes(8, "big")


def forward(b: ExpertBackend, *xs: Tensor, train: bool = True, keep: bool = True) -> list[ForwardResult]:
    results = b.forward([ForwardJob(rid(), [x], train, keep) for x in xs])
    assert all(isinstance(r, ForwardResult) for r in results)
    return results  # type: ignore[return-value]


def job(x: Tensor, g: Tensor, apply: bool = True, peer: PeerId = PEER, **kwargs: Any) -> BackwardJob:
    return BackwardJob(peer, kwargs.pop("request_id", None) or rid(), [x], [g], apply, **kwargs)


def weights(b: ExpertBackend) -> list[Tensor]:
    return [p.detach().clone() for p in b.module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_batch_gives_each_request_its_own_rows() -> None:
    b = backend()
    xs = [torch.randn(n, HID) for n in (3, 1, 0, 2)]
    for x, result in zip(xs, forward(b, *xs), strict=True):
        torch.testing.assert_close(result.outputs[0], b.module(x))
        assert result.graph is None, "a batch of several keeps no graph"


def test_large_requests_of_one_batch_keep_a_graph_each_and_make_one_step() -> None:
    b, alone = backend(), backend()
    xs = [torch.randn(KEEP_GRAPH_TOKENS + n, HID) for n in (0, 3)]
    gs = [torch.randn(x.shape) / x.shape[0] for x in xs]
    kept = forward(b, *xs)
    assert all(result.graph is not None for result in kept)
    results = b.backward([job(x, g, graph=k.graph) for x, g, k in zip(xs, gs, kept, strict=True)])
    wanted = alone.backward([job(x, g) for x, g in zip(xs, gs, strict=True)])
    assert b.weight_version == 1
    for result, want in zip(results, wanted, strict=True):
        assert isinstance(result, BackwardResult)
        assert isinstance(want, BackwardResult)
        torch.testing.assert_close(result.grad_inputs, want.grad_inputs)
    torch.testing.assert_close(weights(b), weights(alone))
    assert all(r.graph is None for r in forward(b, *xs, train=False, keep=False))


def test_a_kept_graph_and_a_recomputed_one_agree_and_a_stale_graph_is_not_used() -> None:
    b = backend()
    x, g = torch.randn(4, HID), torch.randn(4, HID)
    [kept], [stale] = forward(b, x), forward(b, x)
    [by_graph] = b.backward([job(x, g, apply=False, graph=kept.graph)])
    [recomputed] = b.backward([job(x, g, apply=False)])
    assert isinstance(by_graph, BackwardResult)
    assert isinstance(recomputed, BackwardResult)
    torch.testing.assert_close(by_graph.grad_inputs, recomputed.grad_inputs)
    b.backward([job(x, g)])
    [late] = b.backward([job(x, g, apply=False, graph=stale.graph)])
    [fresh] = b.backward([job(x, g, apply=False)])
    assert isinstance(late, BackwardResult)
    assert isinstance(fresh, BackwardResult)
    assert torch.equal(late.grad_inputs[0], fresh.grad_inputs[0])
    assert not torch.equal(late.grad_inputs[0], recomputed.grad_inputs[0])
    assert (b.weight_version, b.applied_requests) == (1, 1)


def test_evaluation_keeps_nothing_and_switches_dropout_off() -> None:
    b = ExpertBackend(ExpertGrid("a", "transformer", config={"hid": 8, "dropout": 0.5}), "a", RUN)
    x = torch.randn(2, 3, 8)
    request = rid()
    first, second = (b.forward([ForwardJob(request, [x], train=False)])[0] for _ in range(2))
    assert isinstance(first, ForwardResult)
    assert isinstance(second, ForwardResult)
    assert torch.equal(first.outputs[0], second.outputs[0])
    assert first.graph is None
    trained = b.forward([ForwardJob(request, [x])])[0]
    assert isinstance(trained, ForwardResult)
    assert not torch.equal(first.outputs[0], trained.outputs[0])


def test_dropout_of_a_batch_is_that_of_each_request_alone() -> None:
    b = ExpertBackend(ExpertGrid("a", "transformer", config={"hid": 8, "dropout": 0.5}), "a", RUN)
    jobs = [ForwardJob(rid(), [torch.randn(2, 3, 8)]) for _ in range(3)]
    together = b.forward(jobs)
    alone = [b.forward([j])[0] for j in jobs]
    for a, c in zip(together, alone, strict=True):
        assert isinstance(a, ForwardResult)
        assert isinstance(c, ForwardResult)
        assert torch.equal(a.outputs[0], c.outputs[0])


def test_the_gradient_is_clipped_after_the_scale_is_taken_out() -> None:
    b = backend(optimizer=OptimizerSpec("sgd", lr=1.0, clip_norm=0.5))
    before = weights(b)
    x, g = torch.randn(4, HID), 100 * torch.randn(4, HID)
    [result] = b.backward([job(x, g * 64)], grad_scale=64.0)
    assert isinstance(result, BackwardResult)
    moved = torch.cat([(p - q).flatten() for p, q in zip(weights(b), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)
    tiny = backend(optimizer=OptimizerSpec("sgd", lr=1.0, clip_norm=1e6))
    plain = backend(optimizer=OptimizerSpec("sgd", lr=1.0))
    for other in (tiny, plain):
        other.backward([job(x, g)])
    assert same(weights(tiny), weights(plain))


def test_one_bad_request_spoils_neither_the_others_nor_the_step() -> None:
    b, alone = backend(), backend()
    x, g = torch.randn(4, HID), torch.randn(4, HID)
    nan = torch.full((1, HID), float("nan"))
    request = rid()
    jobs = [
        job(x, g, request_id=request),
        job(nan, g[:1]),
        job(x[:1], nan),
        job(x[:2], torch.full((2, HID), 3e38)),
        job(x, g, request_id=request),
        job(x, g[:, :2]),
    ]
    results = b.backward(jobs)
    kinds = [NonFiniteError, NonFiniteError, NonFiniteError, StaleRequestError]
    assert [type(r) for r in results[1:5]] == kinds
    assert isinstance(results[5], SchemaMismatchError | ExpertFailedError)
    [expected] = alone.backward([job(x, g)])
    assert isinstance(results[0], BackwardResult)
    assert isinstance(expected, BackwardResult)
    torch.testing.assert_close(results[0].grad_inputs, expected.grad_inputs)
    assert results[0].applied
    assert same(weights(b), weights(alone))
    assert (b.weight_version, b.applied_requests) == (1, 1)


def test_a_batch_in_which_nothing_is_left_changes_nothing() -> None:
    b = backend(optimizer=OptimizerSpec("adamw", lr=1.0))
    before = weights(b)
    huge = torch.full((1, HID), MAX_GRADIENT_NORM * 10)
    results = b.backward([job(torch.randn(1, HID), huge)])
    assert isinstance(results[0], NonFiniteError)
    assert same(weights(b), before)
    assert b.weight_version == 0
    assert all(p.grad is None for p in b.parameters)


def test_a_sum_that_overflows_fails_all_and_changes_nothing() -> None:
    b = backend(optimizer=OptimizerSpec("sgd", lr=1.0))
    x = torch.randn(1, HID)
    [probe] = b.backward([job(x, torch.ones(1, HID), apply=False)])
    assert isinstance(probe, BackwardResult)
    before = weights(b)
    # each alone is just below the limit: the norm grows with the gradient
    low, high = 1.0, MAX_GRADIENT_NORM
    for _ in range(60):
        middle = (low * high) ** 0.5
        trial = backend().backward([job(x, torch.full((1, HID), middle))])
        low, high = (middle, high) if isinstance(trial[0], BackwardResult) else (low, middle)
    [kept] = forward(b, x)
    [other] = forward(b, x)
    g = torch.full((1, HID), low * 0.9)
    results = b.backward([job(x, g, graph=kept.graph), job(x, g, graph=other.graph)])
    assert [type(r) for r in results] == [NonFiniteError, NonFiniteError]
    assert same(weights(b), before)


def test_gradients_without_apply_come_without_a_step_and_mix_with_others() -> None:
    b, alone = backend(), backend()
    x, g = torch.randn(3, HID), torch.randn(3, HID)
    results = b.backward([job(x, g), job(2 * x, g, apply=False)])
    assert [r.applied for r in results if isinstance(r, BackwardResult)] == [True, False]
    alone.backward([job(x, g)])
    assert same(weights(b), weights(alone))


def test_deferred_gradients_are_one_step_with_the_next_one_that_is_not() -> None:
    b, whole = backend(optimizer=OptimizerSpec("adamw", lr=0.1)), backend(optimizer=OptimizerSpec("adamw", lr=0.1))
    x, g = torch.randn(6, HID), torch.randn(6, HID)
    before = weights(b)
    kept = forward(b, x[:2])[0].graph
    [first] = b.backward([job(x[2:4], g[2:4], defer=True)])
    [second] = b.backward([job(x[:2], g[:2], defer=True, graph=kept)])
    assert same(weights(b), before)
    [last] = b.backward([job(x[4:], g[4:])])
    [all_at_once] = whole.backward([job(x, g)])
    assert isinstance(first, BackwardResult)
    assert isinstance(second, BackwardResult)
    assert isinstance(last, BackwardResult)
    assert isinstance(all_at_once, BackwardResult)
    assert first.applied
    parts = torch.cat([r.grad_inputs[0] for r in (second, first, last)])
    torch.testing.assert_close(parts, all_at_once.grad_inputs[0])
    torch.testing.assert_close(weights(b), weights(whole))
    assert (b.weight_version, b.applied_requests) == (1, 3)
    repeated = job(x[:2], g[:2], defer=True)
    b.backward([repeated])
    assert isinstance(b.backward([repeated])[0], StaleRequestError), "deferred is as good as applied"


def test_an_expert_without_parameters_passes_gradients_through() -> None:
    b = backend("nop")
    x, g = torch.randn(3, HID), torch.randn(3, HID)
    [kept] = forward(b, x)
    [result] = b.backward([job(x, g, graph=kept.graph)])
    assert isinstance(result, BackwardResult)
    assert torch.equal(result.grad_inputs[0], g)
    assert (result.applied, b.weight_version, b.optimizer) == (True, 0, None)


def test_experts_with_several_inputs_and_their_own_failures() -> None:
    @expert("odd", inputs=lambda c: [TensorSpec((None,), "int64"), TensorSpec((None, 4)), TensorSpec((None, 4))])
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.wrong = False

        def forward(self, index: Tensor, x: Tensor, unused: Tensor) -> Any:
            return x.sum() if self.wrong else (self.table(index) * x, index)

    b = ExpertBackend(ExpertGrid("a", Odd, optimizer=OptimizerSpec("sgd", lr=0.1)), "a", RUN)
    inputs = [torch.tensor([1, 2]), torch.randn(2, 4), torch.randn(2, 4)]
    grads = [torch.randn(2, 4), torch.zeros(2, dtype=torch.int64)]
    [result] = b.backward([BackwardJob(PEER, rid(), inputs, grads, True)])
    assert isinstance(result, BackwardResult)
    assert [tuple(t.shape) for t in result.grad_inputs] == [(0,), (2, 4), (2, 4)]
    assert not result.grad_inputs[2].any()
    assert b.weight_version == 1
    [bad] = b.forward([ForwardJob(rid(), [torch.tensor([11, 0]), *inputs[1:]])])
    assert isinstance(bad, ExpertFailedError)
    assert "IndexError" in bad.message
    b.module.wrong = True  # type: ignore[assignment]
    [bad] = b.forward([ForwardJob(rid(), inputs)])
    assert isinstance(bad, ExpertFailedError)


def test_outputs_that_overflow_are_refused() -> None:
    b = backend()
    with torch.no_grad():
        b.module.up.weight.fill_(3e38)  # type: ignore[union-attr, operator]
    [result] = b.forward([ForwardJob(rid(), [torch.randn(2, HID)])])
    assert isinstance(result, NonFiniteError)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adagrad", "rmsprop", "nadam"])
def test_a_copy_trains_on_like_the_original(name: str) -> None:
    spec = OptimizerSpec(name, lr=0.05, momentum=0.9) if name == "sgd" else OptimizerSpec(name, lr=0.05)
    original, copy = backend(optimizer=spec), backend(optimizer=spec)
    batches = [(torch.randn(3, HID), torch.randn(3, HID)) for _ in range(5)]
    for x, g in batches[:3]:
        original.backward([job(x, g)])
    restore(copy, capture(original))
    assert copy.weight_version == 3
    assert same(weights(copy), weights(original))
    for x, g in batches[3:]:
        original.backward([job(x, g)])
        copy.backward([job(x, g)])
    assert same(weights(copy), weights(original))
    assert (copy.weight_version, copy.stepper.made) == (5, 2)


def test_a_snapshot_does_not_change_with_the_expert() -> None:
    b = backend()
    snapshot = capture(b)
    before = {n: t.clone() for n, t in snapshot.tensors.items()}
    b.backward([job(torch.randn(3, HID), torch.randn(3, HID))])
    assert all(torch.equal(before[n], t) for n, t in snapshot.tensors.items())
    assert same([t for n, t in before.items()], weights(backend()))


def _snapshot(change: str) -> Snapshot:
    b = backend(optimizer=OptimizerSpec("adamw", lr=0.1))
    b.backward([job(torch.randn(3, HID), torch.randn(3, HID))])
    good = capture(b)
    tensors, metadata = {n: t.clone() for n, t in good.tensors.items()}, dict(good.metadata)
    if change == "uid":
        metadata["uid"] = "a.1"
    elif change == "version":
        metadata["weight_version"] = -1
    elif change == "missing":
        del tensors["model.up.bias"]
    elif change == "shape":
        tensors["model.up.bias"] = tensors["model.up.bias"][1:]
    elif change == "dtype":
        tensors["model.up.bias"] = tensors["model.up.bias"].double()
    elif change == "nan":
        tensors["model.up.bias"][0] = float("nan")
    elif change == "moment":
        tensors["optimizer.0.exp_avg"][0] = float("inf")
    elif change == "index":
        tensors["optimizer.99.exp_avg"] = torch.zeros(1)
    elif change == "size":
        tensors["optimizer.0.exp_avg"] = torch.zeros(1000)
    elif change == "other size":
        tensors["optimizer.0.exp_avg"] = tensors["optimizer.0.exp_avg"].reshape(-1)[1:]
    elif change == "half a state":
        del tensors["optimizer.0.exp_avg_sq"]
    elif change == "another optimizer's":
        tensors["optimizer.0.momentum_buffer"] = tensors["optimizer.0.exp_avg"].clone()
    elif change == "integers":
        tensors["optimizer.0.exp_avg"] = tensors["optimizer.0.exp_avg"].long()
    elif change == "negative step":
        tensors["optimizer.0.step"] = torch.tensor(-1.0)
    elif change == "negative square":
        tensors["optimizer.0.exp_avg_sq"].neg_()
    elif change in ("\u00b2", "9" * 5000, "-1"):
        metadata["scalars"] = {change: {"step": 1}}
    elif change == "scalar for a tensor":
        metadata["scalars"] = {"0": {"exp_avg": 1.0}}
    elif change == "name":
        tensors["extra"] = torch.zeros(1)
    elif change == "scalars":
        metadata["scalars"] = {"99": {"x": 1}}
    return Snapshot.build(tensors, metadata)


@pytest.mark.parametrize(
    "change",
    [
        *("uid", "version", "missing", "shape", "dtype", "nan", "moment", "index", "size", "name", "scalars"),
        *("other size", "half a state", "another optimizer's", "integers", "negative step", "negative square"),
        *("\u00b2", "9" * 5000, "-1", "scalar for a tensor"),
    ],
)
def test_a_snapshot_that_does_not_fit_changes_nothing(change: str) -> None:
    b = backend(optimizer=OptimizerSpec("adamw", lr=0.1))
    before = weights(b)
    with pytest.raises((SchemaMismatchError, NonFiniteError)):
        restore(b, _snapshot(change))
    assert same(weights(b), before)
    assert b.weight_version == 0
    restore(b, _snapshot("nothing"))
    assert b.weight_version == 1


def test_initial_weights_are_the_defined_ones() -> None:
    assert isinstance(backend().module, FeedForward)
    assert same(weights(backend()), [p.detach() for p in build_expert(grid(), "a.0", RUN).parameters()])


def test_a_liar_does_not_wreck_the_expert_and_is_told_apart_in_a_batch() -> None:
    torch.manual_seed(0)
    options = ComputeOptions(gradient_norm_ratio=10.0)
    b = ExpertBackend(grid(optimizer=OptimizerSpec("sgd", lr=0.01)), "a.0", RUN, options=options)
    alone = backend(optimizer=OptimizerSpec("sgd", lr=0.01))
    x, g = torch.randn(4, HID), torch.randn(4, HID)
    for _ in range(3):
        b.backward([job(x, g)])
        alone.backward([job(x, g)])
    assert same(weights(b), weights(alone)), "one trainer is not limited"
    before = weights(b)
    honest, lie = b.backward([job(x, g), job(x, 1e6 * g, peer=LIAR)])
    assert isinstance(honest, BackwardResult)
    assert isinstance(lie, BackwardResult)
    assert (honest.applied, honest.limit) == (True, 1.0)
    assert lie.applied
    assert lie.limit < 1e-4
    # input gradients are the caller's own affair
    torch.testing.assert_close(lie.grad_inputs[0], 1e6 * honest.grad_inputs[0], rtol=1e-3, atol=10.0)
    alone.backward([job(x, g)])
    step = torch.cat([(p - q).flatten() for p, q in zip(weights(alone), before, strict=True)]).norm()
    moved = torch.cat([(p - q).flatten() for p, q in zip(weights(b), before, strict=True)]).norm()
    assert moved <= 15 * step
    unlimited = backend(optimizer=OptimizerSpec("sgd", lr=0.01))
    unlimited.backward([job(x, g), job(x, 1e6 * g, peer=LIAR)])
    wrecked = torch.cat([(p - q).flatten() for p, q in zip(weights(unlimited), weights(backend()), strict=True)]).norm()
    assert wrecked > 1e4 * step


def test_autocast_computes_in_bf16_and_answers_in_the_declared_dtype() -> None:
    torch.manual_seed(0)
    exact = backend(inner=64)
    fast = ExpertBackend(grid(inner=64), "a.0", RUN, options=ComputeOptions(autocast="bf16"))
    x, g = torch.randn(32, HID), torch.randn(32, HID)
    [want], [got] = forward(exact, x), forward(fast, x)
    assert got.outputs[0].dtype == torch.float32
    assert not torch.equal(got.outputs[0], want.outputs[0])
    torch.testing.assert_close(got.outputs[0], want.outputs[0], rtol=2e-2, atol=2e-2)
    for kept in (False, True):
        [w] = exact.backward([job(x, g, apply=False, graph=want.graph if kept else None)])
        [f] = fast.backward([job(x, g, apply=False, graph=got.graph if kept else None)])
        assert isinstance(w, BackwardResult)
        assert isinstance(f, BackwardResult)
        assert f.grad_inputs[0].dtype == torch.float32
        torch.testing.assert_close(f.grad_inputs[0], w.grad_inputs[0], rtol=5e-2, atol=5e-2)
    fast.backward([job(x, g)])
    assert all(p.dtype == torch.float32 for p in fast.parameters)
    assert fast.weight_version == 1


def test_a_compiled_expert_equals_the_plain_one_for_any_number_of_tokens() -> None:
    torch.manual_seed(0)
    plain, compiled = backend(), ExpertBackend(grid(), "a.0", RUN, options=ComputeOptions(compile_backend="eager"))
    assert not compiled.notices
    for n in (1, 2, 7):
        x, g = torch.randn(n, HID), torch.randn(n, HID)
        [want], [got] = forward(plain, x), forward(compiled, x)
        torch.testing.assert_close(got.outputs[0], want.outputs[0])
        for b, kept in ((plain, want), (compiled, got)):
            [result] = b.backward([job(x, g, graph=kept.graph)])
            assert isinstance(result, BackwardResult)
    assert compiled._compiled is not None
    for p, q in zip(weights(plain), weights(compiled), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("late", [False, True])
def test_a_compiler_that_fails_is_given_up_with_an_event(late: bool) -> None:
    failing = False

    def broken(graph: Any, examples: Any) -> Any:
        def run(*args: Any) -> Any:
            if failing:
                raise RuntimeError("no such kernel")
            return graph(*args)

        if not late:
            raise RuntimeError("cannot compile")
        return run

    b = ExpertBackend(grid(), "a.0", RUN, options=ComputeOptions(compile_backend=broken))  # type: ignore[arg-type]
    failing = late
    assert len(b.notices) == (0 if late else 1)
    x = torch.randn(3, HID)
    [result] = forward(b, x)
    torch.testing.assert_close(result.outputs[0], backend().module(x))
    assert [type(n) for n in b.notices] == [CompileFailed]
    forward(b, x)
    assert len(b.notices) == 1
    torch.compiler.reset()


def test_a_request_that_is_wrong_does_not_cost_the_compiler() -> None:
    b = ExpertBackend(grid(), "a.0", RUN, options=ComputeOptions(compile_backend="eager"))
    [bad] = b.forward([ForwardJob(rid(), [torch.randn(2, HID + 1)])])
    assert isinstance(bad, ExpertFailedError)
    assert b._compiled is not None
    assert not b.notices


def test_what_was_copied_ahead_is_used_and_gives_the_same_results() -> None:
    ahead, plain = backend(), backend()
    xs, gs = [torch.randn(n, HID) for n in (3, 2)], [torch.randn(n, HID) for n in (3, 2)]
    for b in (ahead, plain):
        jobs = [ForwardJob(rid(), [x]) for x in xs]
        backward = [job(x, g) for x, g in zip(xs, gs, strict=True)]
        if b is ahead:
            b.prepare(jobs)
            b.prepare(backward)
            assert all(j.staged is not None for j in jobs)
        outputs = [r.outputs[0] for r in b.forward(jobs) if isinstance(r, ForwardResult)]
        grads = [r.grad_inputs[0] for r in b.backward(backward) if isinstance(r, BackwardResult)]
        if b is ahead:
            expected = outputs, grads
    for got, want in zip(outputs + grads, expected[0] + expected[1], strict=True):
        assert torch.equal(got, want)
    assert same(weights(ahead), weights(plain))


def test_a_stale_graph_that_was_prepared_is_computed_again_from_its_inputs() -> None:
    b, plain = backend(), backend()
    x, g = torch.randn(3, HID), torch.randn(3, HID)
    [kept] = forward(b, x)
    for one in (b, plain):
        one.backward([job(x, g)])
    late = job(x, g, graph=kept.graph)
    b.prepare([late])
    [got], [want] = b.backward([late]), plain.backward([job(x, g)])
    assert isinstance(got, BackwardResult)
    assert isinstance(want, BackwardResult)
    assert torch.equal(got.grad_inputs[0], want.grad_inputs[0])
    assert same(weights(b), weights(plain))
