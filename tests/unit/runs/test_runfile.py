"""`run.toml`: what it may say, and errors that name file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.runs.runfile import RunFile

GOOD = """
name = "my-lm"
preset = "lan"
imports = ["my_experts"]

[[experts]]
grid = "ffn.[0:4].[0:4]"
module = "ffn"
config = { hid = 256 }
replicas = 3
optimizer = { name = "adamw", lr = 1e-3, clip_norm = 1.0 }

[[experts]]
grid = "head"
module = "nop"
"""


def load(tmp_path: Path, text: str) -> RunFile:
    path = tmp_path / "run.toml"
    path.write_text(text, "utf-8")
    return RunFile.load(path)


def test_a_whole_file(tmp_path: Path) -> None:
    run = load(tmp_path, GOOD)
    assert (run.name, run.preset, run.imports) == ("my-lm", "lan", ("my_experts",))
    ffn, head = run.experts
    assert (ffn.name, ffn.dims, ffn.replicas, dict(ffn.config)) == ("ffn", (4, 4), 3, {"hid": 256})
    assert (ffn.optimizer.name, ffn.optimizer.clip_norm, dict(ffn.optimizer.arguments)) == ("adamw", 1.0, {"lr": 1e-3})
    assert (head.size, head.replicas) == (1, 2)


def test_a_name_is_enough(tmp_path: Path) -> None:
    run = load(tmp_path, 'name = "averaging only"')
    assert (run.preset, run.imports, run.experts) == ("wan", (), ())


def test_the_example_in_the_module_is_right(tmp_path: Path) -> None:
    from swarm.runs import runfile

    assert runfile.__doc__ is not None
    example = runfile.__doc__.split("```toml\n")[1].split("```")[0]
    assert load(tmp_path, example).experts[0].size == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "name: Field required"),
        ("name = 7", "name: "),
        ('name = "a/b"', "name: 'a/b' cannot name a run"),
        ('name = "x"\npreset = "moon"', "preset: "),
        ('name = "x"\nexpert = []', "expert: "),
        ('name = "x"\nexperts = {}', "experts: "),
        ('name = "x"\n[[experts]]\nmodule = "ffn"', r"experts\[0\].grid: Field required"),
        ('name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\nreplica = 2', r"experts\[0\].replica: "),
        ('name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\nreplicas = 0', r"experts\[0\].replicas: "),
        ('name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\nreplicas = 65', r"experts\[0\]: replicas=65"),
        ('name = "x"\n[[experts]]\ngrid = "ffn.[1:4]"\nmodule = "ffn"', r"experts\[0\]: 'ffn.\[1:4\]'"),
        ('name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "a b"', r"experts\[0\]: 'a b'"),
        ('name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\noptimizer = "adamw"', r"experts\[0\].optimizer: "),
        (
            'name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\noptimizer = { name = "m agic" }',
            r"experts\[0\]: 'm agic' cannot name an optimizer",
        ),
        (
            'name = "x"\n[[experts]]\ngrid = "ffn"\nmodule = "ffn"\n[[experts]]\ngrid = "ffn.[0:2]"\nmodule = "ffn"',
            r"experts\[1\].grid: 'ffn' is there twice",
        ),
        ("name = \n", "not valid TOML.*line 1"),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load(tmp_path, text)
    assert "run.toml" in caught.value.message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        RunFile.load(tmp_path / "run.toml")


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.load(tmp_path)


def test_bytes_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunFile.load(path)


def test_a_file_that_is_far_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="larger than"):
        load(tmp_path, "#" * (1024 * 1024 + 1))
