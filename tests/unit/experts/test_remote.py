"""One remote expert as a module, over gRPC, called from a user's thread."""

from __future__ import annotations

import threading

import pytest
import torch

from swarm.errors import NonFiniteError, NotEnoughExpertsError, SchemaMismatchError, UnknownExpertError, UsageError
from swarm.experts.remote import RemoteExpert
from tests.support import GrpcWorld
from tests.unit.experts.fakes import DIM, GRID, LR, local_experts, set_stage

UIDS = GRID.uids()


def test_acts_like_the_expert_itself_in_both_passes(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    remote, local = RemoteExpert(stage, UIDS[2]), local_experts()[UIDS[2]]
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for _ in range(3):
        x, mine = torch.randn(5, DIM).requires_grad_(), torch.zeros(5, DIM)
        mine = x.detach().clone().requires_grad_()
        out, reference = remote(x), local(mine)
        torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-6)
        out.square().sum().backward()
        reference.square().sum().backward()
        torch.testing.assert_close(x.grad, mine.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()


def test_works_from_many_threads_at_once(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    remote, local, wrong = RemoteExpert(stage, UIDS[0]).eval(), local_experts()[UIDS[0]], []

    def work() -> None:
        for _ in range(10):
            x = torch.randn(4, DIM)
            if not torch.allclose(remote(x), local(x), atol=1e-6):
                wrong.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert remote.stats.calls == 40


def test_a_gradient_that_nobody_returns_is_zero(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    remote = RemoteExpert(stage, UIDS[0], backward_timeout_s=0.3)
    stage.hosts[0].always["backward"] = "hang"
    x = torch.randn(4, DIM).requires_grad_()
    remote(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum().item() == 0.0
    assert (remote.stats.missing_gradients, remote.stats.lost_updates) == (1, 1)


def test_no_answer_is_an_error_that_says_why(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    stage.hosts[0].always["forward"] = "nan"
    with pytest.raises(NotEnoughExpertsError, match=r"tanh\.0\.0 did not answer: .*NaN"):
        RemoteExpert(stage, UIDS[0])(torch.randn(4, DIM))


def test_bad_arguments_are_refused_before_anything_is_sent(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    remote = RemoteExpert(stage, UIDS[0])
    x = torch.randn(4, DIM)
    for wrong in ((), (x, x), (x.double(),), (x[:, 1:],), (x[0],)):
        with pytest.raises(SchemaMismatchError, match=r"expert tanh\.0\.0 got"):
            remote(*wrong)
    with pytest.raises(NonFiniteError, match=r"expert tanh\.0\.0"):
        remote(x / 0)
    with pytest.raises(UnknownExpertError):
        RemoteExpert(stage, "tanh.7.7")
    assert stage.hosts[0].log == []


def test_a_graph_may_be_used_for_several_backward_passes(grpc_world: GrpcWorld) -> None:
    stage = grpc_world.run(lambda: set_stage(grpc_world, [UIDS]))
    remote = RemoteExpert(stage, UIDS[0])
    x = torch.randn(4, DIM).requires_grad_()
    out = remote(x).sum()
    out.backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    out.backward()
    assert not torch.equal(x.grad, once)
    assert (len(set(stage.hosts[0].applied)), remote.stats.lost_updates, remote.stats.missing_gradients) == (2, 0, 0)


@pytest.mark.parametrize("name", ["topk", "int4", "auto", "float16"])
def test_codecs_that_lose_too_much_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot travel"):
        RemoteExpert(None, "a.0", codec=name)  # type: ignore[arg-type]
