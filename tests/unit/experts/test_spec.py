"""Descriptions of experts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from torch import nn

from swarm.errors import ConfigError, MalformedFrameError
from swarm.experts.spec import (
    MAX_UID_CHARS,
    ExpertGrid,
    OptimizerSpec,
    TensorSpec,
    expert,
    optimizer,
    optimizer_factories,
    parse_uid,
    registered,
)


def test_a_grid_names_its_experts_in_row_major_order() -> None:
    grid = ExpertGrid("ffn.[0:2].[0:3]", "ffn")
    assert (grid.name, grid.dims, grid.size) == ("ffn", (2, 3), 6)
    assert grid.uids() == ["ffn.0.0", "ffn.0.1", "ffn.0.2", "ffn.1.0", "ffn.1.1", "ffn.1.2"]
    assert "ffn.1.2" in grid
    assert not any(uid in grid for uid in ("ffn.2.0", "ffn.1", "ffn.1.2.0", "head.0.0", "ffn.01.0", "?"))


def test_a_pattern_without_ranges_is_a_single_expert() -> None:
    assert ExpertGrid("head", "ffn").uids() == ["head"]


@pytest.mark.parametrize(
    "pattern", ["", "ffn.[1:4]", "ffn.[0:0]", "ffn.4", "1ffn.[0:2]", "ffn.[0:04]", "ffn.[0:9999999]"]
)
def test_patterns_that_cannot_work_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError):
        ExpertGrid(pattern, "ffn")


@pytest.mark.parametrize("replicas", [0, 65, True, 1.5])
def test_replicas_are_a_small_whole_number(replicas: object) -> None:
    with pytest.raises(ConfigError):
        ExpertGrid("ffn.[0:2]", "ffn", replicas=replicas)  # type: ignore[arg-type]


def test_a_grid_survives_the_journey_through_json() -> None:
    grid = ExpertGrid(
        "ffn.[0:2]",
        "ffn",
        config={"hid": 32, "nested": {"a": [1, 2]}},
        replicas=3,
        optimizer=OptimizerSpec(
            "adamw", lr=1e-3, betas=(0.9, 0.95), clip_norm=1.0, schedule="linear", total_steps=9, accumulate_tokens=64
        ),
    )
    again = ExpertGrid.from_dict(json.loads(json.dumps(grid.to_dict())))
    assert again == grid
    assert again.to_dict() == grid.to_dict()
    assert again.optimizer.arguments == {"lr": 1e-3, "betas": [0.9, 0.95]}


@pytest.mark.parametrize(
    "change",
    [
        {"pattern": 3},
        {"module": None},
        {"config": [1]},
        {"optimizer": "adamw"},
        {"optimizer": {"name": "no name"}},
        {"optimizer": {"name": "adam", "schedule": "cyclic"}},
        {"optimizer": {"name": "adam", "schedule": "linear"}},
        {"optimizer": {"name": "adam", "total_steps": 9}},
        {"optimizer": {"name": "adam", "schedule": "cosine", "warmup_steps": 9, "total_steps": 9}},
        {"optimizer": {"name": "adam", "warmup_steps": -1}},
        {"optimizer": {"name": "adam", "warmup_steps": True}},
        {"optimizer": {"name": "adam", "min_lr_fraction": 1.5}},
        {"optimizer": {"name": "adam", "accumulate_tokens": 0}},
        {"optimizer": {"name": "adam", "arguments": {"schedule": "linear"}}},
        {"optimizer": {"name": "adam", "arguments": {"clip_norm": 1}}},
        {"replicas": "2"},
    ],
)
def test_a_malformed_description_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ExpertGrid.from_dict({**ExpertGrid("ffn.[0:2]", "ffn").to_dict(), **change})


def test_config_must_be_json_and_is_copied() -> None:
    with pytest.raises(ConfigError):
        ExpertGrid("ffn.[0:2]", "ffn", config={"activation": print})
    with pytest.raises(ConfigError):
        OptimizerSpec("sgd", lr=float("nan"))
    config = {"hid": 8}
    grid = ExpertGrid("ffn.[0:2]", "ffn", config=config)
    config["hid"] = 9
    assert grid.config["hid"] == 8


def test_a_description_without_schedule_or_accumulation_has_the_defaults() -> None:
    old = {"name": "adamw", "clip_norm": 1.0, "arguments": {"lr": 0.1}}
    assert OptimizerSpec.from_dict(old) == OptimizerSpec("adamw", lr=0.1, clip_norm=1.0)
    assert OptimizerSpec.from_dict(old).schedule == "constant"


def test_an_optimizer_factory_has_one_name_that_torch_does_not_use() -> None:
    def mine(parameters: object) -> None: ...
    def other(parameters: object) -> None: ...

    try:
        assert optimizer("mine")(mine) is mine  # type: ignore[type-var]
        optimizer("mine")(mine)  # type: ignore[type-var]
        with pytest.raises(ConfigError, match="taken"):
            optimizer("mine")(other)  # type: ignore[type-var]
    finally:
        optimizer_factories.pop("mine", None)
    for name in ("adam", "no spaces"):
        with pytest.raises(ConfigError):
            optimizer(name)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), "1"])
def test_a_clip_norm_is_positive_and_finite(clip: object) -> None:
    with pytest.raises(ConfigError):
        OptimizerSpec("sgd", clip_norm=clip)  # type: ignore[arg-type]


def test_a_class_is_registered_under_one_name_and_a_grid_may_name_the_class() -> None:
    class Mine(nn.Module):
        pass

    class Other(nn.Module):
        pass

    try:
        assert expert("mine", inputs=lambda c: [TensorSpec((None, 1))])(Mine) is Mine
        expert("mine", inputs=lambda c: [TensorSpec((None, 2))])(Mine)
        with pytest.raises(ConfigError):
            expert("mine", inputs=lambda c: [])(Other)
        assert ExpertGrid("m.[0:2]", Mine).module == "mine"
        with pytest.raises(ConfigError, match="not registered"):
            ExpertGrid("m.[0:2]", Other)
    finally:
        registered.pop("mine", None)
    with pytest.raises(ConfigError):
        expert("no spaces", inputs=lambda c: [])


@pytest.mark.parametrize("shape", [(), (4,), (None, -1), (None, 2.0), (None, True)])
def test_a_tensor_spec_starts_with_its_tokens(shape: tuple[object, ...]) -> None:
    with pytest.raises(ConfigError):
        TensorSpec(shape)  # type: ignore[arg-type]


def test_a_tensor_spec_matches_shapes_and_dtypes() -> None:
    spec = TensorSpec((None, None, 8), "bfloat16")
    assert spec.matches((3, 5, 8), "bfloat16")
    assert not spec.matches((3, 5, 8), "float32")
    assert not spec.matches((3, 5, 9), "bfloat16")
    assert not spec.matches((3, 8), "bfloat16")
    assert str(spec) == "bfloat16[tokens, ?, 8]"
    with pytest.raises(ConfigError):
        TensorSpec((None,), "../x")


def test_uids_are_parsed_strictly() -> None:
    assert parse_uid("ffn.3.17") == ("ffn", (3, 17))
    assert parse_uid("head") == ("head", ())
    for bad in (
        "",
        ".1",
        "ffn.",
        "ffn.-1",
        "ffn.x",
        "ffn.01",
        "a/b",
        "f" * (MAX_UID_CHARS + 1),
        "ffn.1\n",
        None,
        b"ffn",
    ):
        with pytest.raises(MalformedFrameError):
            parse_uid(bad)  # type: ignore[arg-type]


def test_descriptions_load_without_torch() -> None:
    code = "import sys, swarm.experts.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
