"""The examples run as they stand and do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(120)
def test_define_an_expert_trains_a_layer_in_other_processes(tmp_path: Path) -> None:
    script = EXAMPLES / "define_an_expert.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.7 * losses[0]
    assert re.search(r"\d+ expert calls, 0 failed", done.stdout)


def test_train_digits_learns_beside_liars_with_a_robust_average_and_not_with_a_plain_one() -> None:
    command = [sys.executable, EXAMPLES / "train_digits.py", "--json", "--attack", "random"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    end = json.loads(done.stdout)
    assert end["robust"]["reducer"] == "centered_clip"
    assert [end[run]["liars"] for run in ("clean", "mean", "robust")] == [0, 2, 2]
    assert end["clean"]["accuracy"] > 0.9
    assert end["robust"]["accuracy"] >= end["clean"]["accuracy"] - 0.02
    assert end["mean"]["accuracy"] < end["clean"]["accuracy"] - 0.5
    assert end["robust"]["rounds"] == end["clean"]["rounds"] == 12
