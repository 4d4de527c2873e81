"""The examples run as they stand and do what they say."""

from __future__ import annotations

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
