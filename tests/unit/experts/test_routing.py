import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from swarm.experts.routing import AuxiliaryLoss, Choice, Dispatch, ProductKeyGate, combine, mixture_weights

torch.set_num_threads(1)


def gate_of(dims: tuple[int, ...], dim: int = 8) -> ProductKeyGate:
    torch.manual_seed(0)
    return ProductKeyGate(dim, dims)


def all_live(gate: ProductKeyGate) -> torch.Tensor:
    return torch.ones(gate.n_experts, dtype=torch.bool)


@pytest.mark.parametrize("dims", [(6,), (3, 4), (2, 3, 2)])
def test_scores_are_sums_of_coordinate_logits_and_choices_are_the_best(dims: tuple[int, ...]) -> None:
    gate, x = gate_of(dims), torch.randn(11, 8)
    choice = gate(x, all_live(gate), k=3)
    logits = gate.projection(x).split(dims, dim=-1)
    for t in range(11):
        expected = torch.zeros(dims)
        for axis, one in enumerate(logits):
            expected = expected + one[t].view([-1 if a == axis else 1 for a in range(len(dims))])
        best = expected.flatten().topk(3)
        assert choice.experts[t].tolist() == best.indices.tolist()
        torch.testing.assert_close(choice.scores[t], best.values)


def test_only_live_experts_are_chosen_and_fewer_where_fewer_are_live() -> None:
    gate, x = gate_of((3, 4)), torch.randn(50, 8)
    live = all_live(gate)
    live[:10] = False
    choice = gate(x, live, k=4)
    assert choice.experts.shape == (50, 2)
    assert set(choice.experts.flatten().tolist()) == {10, 11}


def test_dispatch_groups_rows_by_expert_and_keeps_token_order() -> None:
    choice = Choice(torch.tensor([[5, 2], [2, 7], [5, 7]]), torch.zeros(3, 2), (), ())
    dispatch = Dispatch.of(choice)
    assert (dispatch.experts, dispatch.counts) == ((2, 5, 7), (2, 2, 2))
    assert dispatch.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert dispatch.answered_slots([True, False, True], choice.scores).tolist() == [
        [False, True],
        [True, True],
        [False, True],
    ]


def test_weights_are_renormalised_over_those_who_answered() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0], [1.0, 1.0, 1.0]], requires_grad=True)
    answered = torch.tensor([[True, False, True], [True, True, False], [False, False, False]])
    weights = mixture_weights(scores, answered)
    torch.testing.assert_close(weights[0], torch.tensor([0.1192029, 0.0, 0.8807971]))
    torch.testing.assert_close(weights[1], torch.tensor([0.5, 0.5, 0.0]))
    assert weights[2].tolist() == [0.0, 0.0, 0.0]
    (weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()
    assert scores.grad[2].tolist() == [0.0, 0.0, 0.0]


def test_dispatch_and_combination_equal_a_dense_mixture_with_gradients() -> None:
    gate = gate_of((2, 3)).double()
    experts = [torch.nn.Linear(8, 5).double() for _ in range(6)]
    x = torch.randn(17, 8, dtype=torch.float64, requires_grad=True)

    def sparse() -> torch.Tensor:
        choice = gate(x, all_live(gate), k=3)
        dispatch = Dispatch.of(choice)
        blocks = x.index_select(0, dispatch.tokens).split(dispatch.counts)
        rows = torch.cat([experts[e](block) for e, block in zip(dispatch.experts, blocks, strict=True)])
        weights = mixture_weights(choice.scores, dispatch.answered_slots([True] * len(blocks), choice.scores))
        return combine(rows, weights, dispatch)

    def dense() -> torch.Tensor:
        first, second = gate.projection(x).float().split((2, 3), dim=-1)
        scores = (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(1)
        top = scores.topk(3, dim=-1)
        weights = torch.zeros_like(scores).scatter(1, top.indices, top.values.softmax(-1))
        return torch.einsum("te,teo->to", weights.double(), torch.stack([e(x) for e in experts], dim=1))

    parameters = [x, *gate.parameters(), *(p for e in experts for p in e.parameters())]
    got = torch.autograd.grad(sparse().square().sum(), parameters)
    expected = torch.autograd.grad(dense().square().sum(), parameters)
    torch.testing.assert_close(sparse(), dense(), rtol=1e-6, atol=1e-7)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_balance_loss_has_a_gradient_that_evens_out_the_use() -> None:
    gate = gate_of((4, 2))
    with torch.no_grad():
        gate.projection.bias[0] += 3.0  # everything goes to the first row
    x = torch.randn(256, 8)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.05)

    def imbalance() -> float:
        rows = gate.coordinates(gate(x, all_live(gate), k=1).experts)[0]
        return float(torch.bincount(rows.flatten(), minlength=4).max()) / 256

    before = imbalance()
    for _ in range(60):
        loss = gate.balance_loss(gate(x, all_live(gate), k=1))
        optimizer.zero_grad()
        loss.backward()
        assert gate.projection.weight.grad is not None
        assert gate.projection.weight.grad.abs().sum() > 0
        optimizer.step()
    assert before > 0.9
    assert imbalance() < 0.5


def test_balance_loss_is_one_per_dimension_when_even_and_does_not_pull_towards_dead_coordinates() -> None:
    gate = gate_of((3, 2))
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
    every = torch.arange(6).view(6, 1)
    choice = gate(torch.randn(6, 8), all_live(gate), k=1)
    assert gate.balance_loss(
        Choice(every, choice.scores, choice.logits, choice.live_coordinates)
    ).item() == pytest.approx(2.0)
    live = all_live(gate)
    live[:2] = False  # nobody holds row 0
    choice = gate(torch.randn(6, 8), live, k=1)
    gate.balance_loss(choice).backward()
    assert gate.projection.bias.grad is not None
    assert gate.projection.bias.grad[0].item() == 0.0


def test_z_loss_is_the_mean_square_of_logsumexp_and_shrinks_logits() -> None:
    gate, x = gate_of((3, 2)), torch.randn(9, 8)
    loss = gate.z_loss(gate(x, all_live(gate), k=1))
    a, b = gate.projection(x).split((3, 2), dim=-1)
    torch.testing.assert_close(loss, a.logsumexp(-1).square().mean() + b.logsumexp(-1).square().mean())
    loss.backward()
    assert gate.projection.weight.grad is not None
    assert gate.projection.weight.grad.abs().sum() > 0


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.aux = AuxiliaryLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux.add((self.scale * x).sum())
        return F.gelu(self.scale * x)


def test_aux_loss_adds_up_forward_passes_and_starts_again() -> None:
    layer, x = _Layer(), torch.arange(3.0)
    layer(x)
    layer(2 * x)
    loss = layer.aux.take(x)
    assert loss.item() == 9.0
    loss.backward()
    assert layer.scale.grad is not None
    assert layer.scale.grad.tolist() == [0.0, 3.0, 6.0]
    assert layer.aux.take(x).item() == 0.0


def test_aux_loss_survives_activation_checkpointing() -> None:
    layer, x = _Layer(), torch.arange(3.0)
    for _ in range(2):
        layer.scale.grad = None
        out = checkpoint(layer, x, use_reentrant=False)
        (out.sum() * 0 + layer.aux.take(x)).backward()  # repeats the forward pass
        assert layer.scale.grad is not None
        assert layer.scale.grad.tolist() == [0.0, 1.0, 2.0]
    assert layer.aux.take(x).item() == 0.0


def test_aux_loss_that_nobody_takes_is_bounded_and_says_so() -> None:
    aux = AuxiliaryLoss()
    for _ in range(AuxiliaryLoss.MAX_PENDING):
        aux.add(torch.ones((), requires_grad=True))
    with pytest.warns(UserWarning, match="aux_loss"):
        aux.add(torch.ones((), requires_grad=True))
    assert aux.take(torch.zeros(1)).item() == AuxiliaryLoss.MAX_PENDING
