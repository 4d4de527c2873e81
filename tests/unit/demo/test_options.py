import pytest

from swarm.demo.options import DemoOptions, grid_dims
from swarm.demo.orchestrator import timeline
from swarm.errors import UsageError


@pytest.mark.parametrize(("experts", "dims"), [(16, (4, 4)), (4, (2, 2)), (12, (3, 4)), (6, (2, 3)), (64, (8, 8))])
def test_experts_are_laid_out_as_the_squarest_grid(experts: int, dims: tuple[int, int]) -> None:
    assert grid_dims(experts) == dims


@pytest.mark.parametrize("experts", [-4, 0, 1, 2, 7, 13, 257])
def test_experts_that_make_no_grid_are_refused(experts: int) -> None:
    with pytest.raises(UsageError, match="grid"):
        DemoOptions(experts=experts)


@pytest.mark.parametrize(
    "options",
    [{"steps": 3}, {"hosts": 0}, {"trainers": 0}, {"hosts": 1}, {"trainers": 1}, {"hosts": 60, "trainers": 60}],
)
def test_options_that_cannot_work_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError) as error:
        DemoOptions(**options)  # type: ignore[arg-type]
    assert error.value.fix


def test_without_faults_one_of_each_is_enough() -> None:
    options = DemoOptions(hosts=1, trainers=1, faults=False)
    assert timeline(options).pending == ()


def test_the_measuring_trainer_and_the_frozen_host_are_not_killed() -> None:
    faults = timeline(DemoOptions(hosts=2, trainers=2)).pending
    assert [f.action for f in faults] == ["freeze", "kill", "kill", "restart"]
    killed = [f.target for f in faults if f.action == "kill"]
    assert "trainer-0" not in killed
    assert faults[0].target not in killed
    assert faults[-1].target == "trainer-1"
