"""The optimizer of one expert: names, factories, schedules, accumulation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import swarm.experts.layers  # noqa: F401 - registers the built-ins before the fixture looks
from swarm.errors import ConfigError, ExpertFailedError, NonFiniteError, UnknownOptimizerError
from swarm.experts.backend import BackwardJob, BackwardResult, ExpertBackend
from swarm.experts.optimizing import MAX_GRADIENT_NORM, ExpertOptimizer, Gradient, lr_factor
from swarm.experts.registry import check_grid
from swarm.experts.replicas import capture, restore
from swarm.experts.spec import (
    OPTIMIZER_NAMES,
    ExpertGrid,
    OptimizerSpec,
    TensorSpec,
    expert,
    optimizer,
    optimizer_factories,
    registered,
)
from swarm.identity import PeerId

RUN, PEER, HID = bytes(32), PeerId(bytes(32)), 4


@pytest.fixture(autouse=True)
def _restore_registries() -> Iterator[None]:
    before, factories = dict(registered), dict(optimizer_factories)
    yield
    registered.clear()
    registered.update(before)
    optimizer_factories.clear()
    optimizer_factories.update(factories)


def grid(spec: OptimizerSpec, module: str = "ffn") -> ExpertGrid:
    return ExpertGrid("a.[0:2]", module, config={"hid": HID}, optimizer=spec)


def stepper(spec: OptimizerSpec, value: float = 1.0) -> tuple[ExpertOptimizer, nn.Parameter]:
    weight = nn.Parameter(torch.full((2, 2), value))
    return ExpertOptimizer(grid(spec), "a.0", [weight]), weight


def gradient(value: float) -> Gradient:
    return Gradient([torch.full((2, 2), value)])


_numbers = iter(range(1, 1 << 30))


def job(x: Tensor, g: Tensor, apply: bool = True, defer: bool = False) -> BackwardJob:
    return BackwardJob(PEER, b"noncenon" + next(_numbers).to_bytes(8, "big"), [x], [g], apply, defer=defer)


def _steps_by_itself(cls: type[torch.optim.Optimizer]) -> bool:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    try:
        cls([weight]).step()  # type: ignore[call-arg]
    except (TypeError, RuntimeError):
        return False
    return True


def test_the_names_are_those_of_what_torch_ships() -> None:
    classes = [
        value
        for value in vars(torch.optim).values()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]
    assert sorted(c.__name__.lower() for c in classes if _steps_by_itself(c)) == list(OPTIMIZER_NAMES)


@expert("linear_without_bias", inputs=lambda c: [TensorSpec((None, HID))])
class Linear(nn.Linear):
    def __init__(self, hid: int = HID) -> None:
        super().__init__(hid, hid, bias=False)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_optimizer_trains_and_a_copy_trains_on_like_the_original(name: str) -> None:
    chosen = grid(OptimizerSpec(name, lr=0.01), "linear_without_bias" if name == "muon" else "ffn")
    check_grid(chosen)
    original, copy = ExpertBackend(chosen, "a.0", RUN), ExpertBackend(chosen, "a.0", RUN)
    batches = [(torch.randn(3, HID), torch.randn(3, HID)) for _ in range(5)]
    for x, g in batches[:3]:
        original.backward([job(x, g)])
    restore(copy, capture(original))
    for x, g in batches[3:]:
        for replica in (original, copy):
            [result] = replica.backward([job(x, g)])
            assert isinstance(result, BackwardResult)
    assert copy.weight_version == 5
    for p, q in zip(original.parameters, copy.parameters, strict=True):
        assert torch.equal(p, q)
    untrained = ExpertBackend(chosen, "a.0", RUN)
    assert not all(torch.equal(p, q) for p, q in zip(original.parameters, untrained.parameters, strict=True))


def test_muon_refuses_vectors_and_says_so() -> None:
    with pytest.raises(ConfigError, match="matrices only"):
        check_grid(grid(OptimizerSpec("muon")))


def test_a_factory_is_used_by_its_name_and_a_name_that_nobody_has_is_refused() -> None:
    @optimizer("vectors_apart")
    class VectorsApart(torch.optim.SGD):
        def __init__(self, parameters: list[Tensor], lr: float, vectors: float) -> None:
            groups: list[dict[str, Any]] = [
                {"params": [p for p in parameters if p.dim() == 2]},
                {"params": [p for p in parameters if p.dim() != 2], "lr": vectors},
            ]
            super().__init__(groups, lr=lr)

    chosen = grid(OptimizerSpec("vectors_apart", lr=1.0, vectors=0.5, schedule="linear", total_steps=2))
    check_grid(chosen)
    backend = ExpertBackend(chosen, "a.0", RUN)
    assert backend.optimizer is not None
    for left in (1.0, 0.5, 0.0, 0.0):
        backend.backward([job(torch.randn(2, HID), torch.randn(2, HID))])
        assert [group["lr"] for group in backend.optimizer.param_groups] == [left, 0.5 * left]
    with pytest.raises(UnknownOptimizerError, match="nobodys"):
        check_grid(grid(OptimizerSpec("nobodys")))


@pytest.mark.parametrize("broken", ["raises", "closure", "no optimizer"])
def test_factories_that_cannot_work_are_found_out_early(broken: str) -> None:
    def make(parameters: list[Tensor]) -> Any:
        if broken == "raises":
            raise KeyError("missing")
        return torch.optim.LBFGS(parameters) if broken == "closure" else object()

    optimizer("broken")(make)
    with pytest.raises(ConfigError):
        check_grid(grid(OptimizerSpec("broken")))


def test_the_schedule_warms_up_and_falls_to_its_floor() -> None:
    linear = OptimizerSpec("sgd", schedule="linear", warmup_steps=4, total_steps=8, min_lr_fraction=0.2)
    assert [lr_factor(linear, s) for s in range(10)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    )
    cosine = OptimizerSpec("sgd", schedule="cosine", total_steps=4, min_lr_fraction=0.0)
    assert [lr_factor(cosine, s) for s in range(6)] == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0, 0.0])
    constant = OptimizerSpec("sgd", warmup_steps=2)
    assert [lr_factor(constant, s) for s in (0, 1, 2, 1000)] == [0.5, 1.0, 1.0, 1.0]


def test_the_schedule_goes_on_where_the_expert_moves_to() -> None:
    spec = OptimizerSpec("sgd", lr=1.0, schedule="linear", total_steps=10)
    old, new = ExpertBackend(grid(spec), "a.0", RUN), ExpertBackend(grid(spec), "a.0", RUN)
    for _ in range(4):
        old.backward([job(torch.randn(2, HID), torch.randn(2, HID))])
    restore(new, capture(old))
    new.backward([job(torch.randn(2, HID), torch.randn(2, HID))])
    assert new.optimizer is not None
    assert new.optimizer.param_groups[0]["lr"] == pytest.approx(0.6)


def test_a_learning_rate_in_a_tensor_follows_the_schedule() -> None:
    @optimizer("tensor_lr")
    def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=torch.tensor(2.0), foreach=False)

    steps, weight = stepper(OptimizerSpec("tensor_lr", schedule="linear", total_steps=2))
    for _ in range(3):
        steps.add(gradient(1.0), 1, 1)
    assert weight[0, 0].item() == pytest.approx(1.0 - 2.0 - 1.0 - 0.0)


def test_without_accumulation_a_batch_is_a_step_with_the_sum() -> None:
    steps, weight = stepper(OptimizerSpec("sgd", lr=1.0))
    assert steps.add(gradient(0.5).plus(gradient(0.25)), 10, 2)
    assert weight[0, 0].item() == 0.25
    assert (steps.steps, steps.samples, steps.pending_tokens) == (1, 10, 0)


def test_accumulation_makes_one_step_with_the_mean_once_the_tokens_are_there() -> None:
    steps, weight = stepper(OptimizerSpec("sgd", lr=1.0, accumulate_tokens=10))
    assert not steps.add(gradient(0.5), 4, 1)
    assert not steps.add(gradient(0.25), 5, 1)
    assert (steps.steps, steps.samples, steps.pending_tokens, steps.pending_requests) == (0, 0, 9, 2)
    assert weight[0, 0].item() == 1.0
    assert steps.add(gradient(0.75), 1, 1)
    assert weight[0, 0].item() == pytest.approx(0.5)
    assert (steps.steps, steps.samples, steps.pending_tokens, steps.pending_requests) == (1, 10, 0, 0)


def test_clipping_applies_to_the_mean() -> None:
    steps, weight = stepper(OptimizerSpec("sgd", lr=1.0, accumulate_tokens=2, clip_norm=1.0))
    steps.add(gradient(30.0), 1, 1)
    steps.add(gradient(-29.0), 1, 1)
    assert weight[0, 0].item() == pytest.approx(0.5), "the mean has norm 1 and is left alone"
    steps.add(gradient(10.0), 2, 1)
    assert (0.5 - weight).norm().item() == pytest.approx(1.0)


def test_deferred_parts_belong_to_the_contribution_that_follows() -> None:
    for target in (None, 1, 4):
        steps, weight = stepper(OptimizerSpec("sgd", lr=1.0, accumulate_tokens=target))
        assert not steps.add(gradient(0.25), 2, 0)
        assert steps.add(gradient(0.25), 2, 1)
        assert weight[0, 0].item() == 0.5, "the parts of one contribution are summed"


def test_a_sum_that_overflows_is_refused_and_what_was_collected_stays() -> None:
    steps, weight = stepper(OptimizerSpec("sgd", lr=1.0, accumulate_tokens=3))
    steps.add(gradient(1.0), 1, 1)
    with pytest.raises(NonFiniteError):
        steps.add(gradient(MAX_GRADIENT_NORM), 1, 1)
    with pytest.raises(NonFiniteError):
        steps.add(gradient(float("nan")), 1, 1)
    assert (steps.pending_tokens, steps.pending_requests, steps.steps) == (1, 1, 0)
    assert steps.add(gradient(0.0), 2, 1)
    assert weight[0, 0].item() == 0.5


def test_a_replica_that_is_given_up_makes_a_step_of_what_it_has() -> None:
    steps, weight = stepper(OptimizerSpec("sgd", lr=1.0, accumulate_tokens=100))
    assert not steps.flush()
    steps.add(gradient(0.5), 1, 1)
    steps.add(gradient(0.25), 1, 1)
    assert steps.flush()
    assert not steps.flush()
    assert weight[0, 0].item() == pytest.approx(0.625)
    assert (steps.steps, steps.samples) == (1, 2)


def test_what_is_collected_is_applied_by_one_replica_only() -> None:
    spec = OptimizerSpec("sgd", lr=1.0, accumulate_tokens=6)
    one, two = ExpertBackend(grid(spec), "a.0", RUN), ExpertBackend(grid(spec), "a.0", RUN)
    x, g = torch.randn(3, HID), torch.randn(3, HID)
    [result] = one.backward([job(x, g)])
    assert isinstance(result, BackwardResult)
    assert result.applied, "the gradient is in the accumulator"
    assert (one.weight_version, one.applied_requests, one.stepper.made) == (0, 1, 0)
    restore(two, capture(one))
    assert two.stepper.pending_tokens == 0
    restore(one, capture(two))
    assert one.stepper.pending_tokens == 3, "a copy of another's weights leaves it alone"
    before = [p.detach().clone() for p in one.parameters]
    one.backward([job(x, g)])
    assert (one.weight_version, one.stepper.made) == (1, 1)
    once = ExpertBackend(grid(OptimizerSpec("sgd", lr=1.0)), "a.0", RUN)
    once.backward([job(x, g)])
    for p, q in zip(one.parameters, once.parameters, strict=True):
        torch.testing.assert_close(p, q, msg="two equal contributions are a step like one of them")
    assert any(not torch.equal(p, q) for p, q in zip(before, one.parameters, strict=True))


def test_an_optimizer_that_fails_is_the_requests_error_and_counts_as_a_step() -> None:
    @optimizer("fails_later")
    class FailsLater(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError("at last")

    steps, weight = stepper(OptimizerSpec("fails_later"))
    with pytest.raises(ExpertFailedError, match="ZeroDivisionError"):
        steps.add(gradient(1.0), 1, 1)
    assert steps.steps == 1
    assert weight.grad is None


def test_the_expected_state_has_the_shapes_of_each_parameter() -> None:
    parameters = [nn.Parameter(torch.zeros(7, 4)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(1, 3))]
    steps = ExpertOptimizer(grid(OptimizerSpec("adafactor")), "a.0", parameters)
    shapes = [{n: tuple(t.shape) for n, t in state.items()} for state in steps.expected_state()]
    assert shapes == [
        {"step": (), "row_var": (7, 1), "col_var": (1, 4)},
        {"step": (), "variance": (7,)},
        {"step": (), "row_var": (1, 1), "col_var": (1, 3)},
    ]
    steps.add(Gradient([torch.ones_like(p) for p in parameters]), 1, 1)
    actual = steps.state()
    for index, expected in enumerate(shapes):
        assert {n: tuple(t.shape) for n, t in actual[index].items()} == expected
