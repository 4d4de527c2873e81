"""Expert classes: resolving, checking, building; and the built-in ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from swarm.errors import ConfigError, UnknownExpertClassError
from swarm.experts.layers import FeedForward
from swarm.experts.registry import (
    build_expert,
    build_optimizer,
    check_grid,
    full_config,
    import_modules,
    output_specs,
    profile,
    resolve,
)
from swarm.experts.seeding import expert_seed
from swarm.experts.spec import ExpertGrid, OptimizerSpec, TensorSpec, expert, registered

RUN = bytes(range(32))


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(registered)
    yield
    registered.clear()
    registered.update(before)


def test_built_in_experts_say_what_they_take_and_give() -> None:
    ffn = check_grid(ExpertGrid("a.[0:2]", "ffn", config={"hid": 8}))
    assert ffn.inputs == ffn.outputs == (TensorSpec((None, 8)),)
    assert ffn.parameters == 8 + 8 + 8 * 32 + 32 + 32 * 8 + 8
    assert ffn.parameter_bytes == 4 * ffn.parameters
    assert ffn.graph_bytes > 0
    assert not ffn.random
    block = check_grid(ExpertGrid("b.[0:2]", "transformer", config={"hid": 8, "seq": 5, "dropout": 0.1}))
    assert block.inputs == block.outputs == (TensorSpec((None, 5, 8)),)
    assert block.random
    free = ExpertGrid("c.[0:2]", "transformer", config={"hid": 8})
    assert output_specs(free) == (TensorSpec((None, None, 8)),)
    assert check_grid(ExpertGrid("d.[0:2]", "nop", config={"hid": 8})).parameters == 0


@pytest.mark.parametrize(
    ("module", "config", "shape"),
    [
        ("ffn", {"hid": 8}, (8,)),
        ("transformer", {"hid": 8}, (3, 8)),
        ("causal_transformer", {"hid": 8}, (3, 8)),
        ("conv", {"channels": 8}, (8, 5, 4)),
        ("nop", {"hid": 8}, (8,)),
    ],
)
def test_built_in_experts_treat_tokens_independently(module: str, config: dict[str, int], shape: tuple[int]) -> None:
    grid = ExpertGrid("a.[0:2]", module, config=config)
    built = build_expert(grid, "a.1", RUN)
    x = torch.randn(4, *shape)
    assert check_grid(grid).inputs == check_grid(grid).outputs
    torch.testing.assert_close(built(x)[1:2], built(x[1:2]))


def test_initial_weights_are_defined_by_run_and_uid_and_leave_the_process_random_state_alone() -> None:
    grid = ExpertGrid("a.[0:2]", "ffn", config={"hid": 8})
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one, same = build_expert(grid, "a.0", RUN), build_expert(grid, "a.0", RUN)
    others = build_expert(grid, "a.1", RUN), build_expert(grid, "a.0", RUN[::-1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.up.weight, same.up.weight)  # type: ignore[union-attr, arg-type]
    assert not any(torch.equal(one.up.weight, o.up.weight) for o in others)  # type: ignore[union-attr, arg-type]
    torch.manual_seed(expert_seed(RUN, "a.0"))
    assert torch.equal(FeedForward(8).up.weight, one.up.weight)  # type: ignore[union-attr, arg-type]
    assert one.training


def test_several_inputs_and_outputs_of_other_dtypes() -> None:
    @expert("lookup", inputs=lambda c: [TensorSpec((None,), "int64"), TensorSpec((None, c["hid"]))])
    class Lookup(nn.Module):
        def __init__(self, hid: int = 4) -> None:
            super().__init__()
            self.table = nn.Embedding(10, hid)

        def forward(self, index: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.table(index) + x, index * 2

    found = profile(ExpertGrid("a", Lookup))
    assert found.outputs == (TensorSpec((None, 4)), TensorSpec((None,), "int64"))
    assert not found.single
    assert full_config(ExpertGrid("a", Lookup)) == {"hid": 4}


def test_unknown_classes_and_configs_fail_early() -> None:
    with pytest.raises(UnknownExpertClassError, match="ffn"):
        resolve("nobody")
    with pytest.raises(ConfigError, match="does not accept"):
        check_grid(ExpertGrid("a", "ffn", config={"width": 3}))
    with pytest.raises(ConfigError):
        check_grid(ExpertGrid("a", "ffn", config={"hid": "wide"}))
    with pytest.raises(ConfigError, match="optimizer"):
        check_grid(ExpertGrid("a", "ffn", optimizer=OptimizerSpec("sgd", nesterov_momentum=1)))


@pytest.mark.parametrize("result", ["x.sum(0)", "x.sum()", "[]", "None", "x.new_zeros(2, 3)"])
def test_outputs_have_a_row_per_token(result: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> object:
            return eval(result, {"x": x})

    expert("odd", inputs=lambda c: [TensorSpec((None, 3))])(Odd)
    with pytest.raises(ConfigError):
        profile(ExpertGrid("a", Odd))


def test_half_precision_parameters_are_refused() -> None:
    @expert("half", inputs=lambda c: [TensorSpec((None, 3), "float16")])
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    with pytest.raises(ConfigError, match="bfloat16"):
        check_grid(ExpertGrid("a", Half))


def test_optimizers_are_built_with_their_arguments() -> None:
    grid = ExpertGrid("a", "ffn", optimizer=OptimizerSpec("adamw", lr=0.5, betas=(0.1, 0.2)))
    weight = nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = build_optimizer(grid, [weight, frozen])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.1, 0.2)
    assert optimizer.param_groups[0]["params"] == [weight]
    assert build_optimizer(grid, [frozen]) is None


def test_modules_are_imported_by_name_or_file(tmp_path: Path) -> None:
    file = tmp_path / "my_swarm_experts.py"
    file.write_text(
        "import torch, swarm.experts.spec as s\n"
        "@s.expert('from_file', inputs=lambda c: [s.TensorSpec((None, 2))])\n"
        "class E(torch.nn.Module):\n    def forward(self, x): return x\n"
    )
    try:
        import_modules([str(file), "json"])
        assert resolve("from_file").cls.__name__ == "E"
    finally:
        sys.modules.pop("my_swarm_experts", None)
    with pytest.raises(ConfigError):
        import_modules(["no.such.module"])
    with pytest.raises(ConfigError):
        import_modules([str(tmp_path / "missing.py")])
