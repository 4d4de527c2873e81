"""The grid: how many cells, who moves where, and that full groups end in the exact mean."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.grid import Grid, cell_count


@given(st.integers(1, 100_000), st.integers(2, 256))
def test_cells_hold_everybody_and_are_three_quarters_full(population: int, max_group: int) -> None:
    cells = cell_count(population, max_group)
    assert cells * max_group >= population
    if cells > 8:
        assert cells <= 1.25 * (population / max_group + 1)
    assert (cells == 1) == (population <= max_group)
    assert cell_count(population + 1, max_group) >= cells


def test_most_small_differences_in_the_count_do_not_matter() -> None:
    differ = sum(cell_count(n, 16) != cell_count(n + 3, 16) for n in range(1000, 4000))
    assert differ < 0.03 * 3000


def test_one_group_needs_no_cell() -> None:
    grid = Grid(16, random.Random(0))
    assert grid.cell(16) == ""
    assert grid.cell(17).startswith("2.")
    assert grid.cell(3) == ""


@pytest.mark.parametrize(("cells_of", "group"), [(256, 16), (4096, 16), (64, 8), (40, 16)])
def test_group_mates_go_to_different_cells(cells_of: int, group: int) -> None:
    mates = [Grid(group, random.Random(i)) for i in range(group)]
    for grid in mates:
        grid._place = 0.3
        grid.cell(cells_of)
    assert len({grid.index for grid in mates}) == 1
    for rank, grid in enumerate(mates):
        grid.advance(rank, b"nonce")
    names = [grid.cell(cells_of) for grid in mates]
    cells = cell_count(cells_of, group)
    assert len(set(names)) == min(group, cells)
    assert max(names.count(name) for name in names) <= -(-group // cells)


@pytest.mark.parametrize(("dimensions", "group"), [(1, 8), (2, 16), (3, 4), (3, 8), (5, 2)])
def test_a_full_grid_has_the_exact_mean_after_as_many_rounds_as_dimensions(dimensions: int, group: int) -> None:
    rng = random.Random(dimensions)
    count = group**dimensions
    cells = count // group
    grids = [Grid(group, random.Random(i)) for i in range(count)]
    for index, grid in enumerate(grids):
        grid._place = (index % cells + 0.5) / cells
    values = [rng.gauss(0, 1) for _ in range(count)]
    mean = sum(values) / count
    for _ in range(dimensions):
        met: dict[str, list[int]] = {}
        for index, grid in enumerate(grids):
            met.setdefault(grid.cell(count), []).append(index)
        assert all(len(members) == group for members in met.values())
        for members in met.values():
            rng.shuffle(members)
            average, nonce = sum(values[i] for i in members) / group, rng.randbytes(16)
            for rank, index in enumerate(members):
                values[index] = average
                grids[index].advance(rank, nonce)
    assert max(abs(value - mean) for value in values) < 1e-12


def test_a_place_keeps_its_meaning_when_the_number_of_cells_changes() -> None:
    grid = Grid(16, random.Random(5))
    seen = set()
    for population in (100, 1000, 30, 5, 64):
        name = grid.cell(population)
        if name:
            cells, index = map(int, name.split("."))
            assert 0 <= index < cells
            seen.add(round(grid._place, 12))
    assert len(seen) == 1
    grid.scatter()
    assert round(grid._place, 12) not in seen
