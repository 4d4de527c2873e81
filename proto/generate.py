"""Generate `swarm/pb` from `proto/`. Run `python proto/generate.py`, or with `--check DIR` to write elsewhere.

The generator must be at most as new as the protobuf runtime's floor in pyproject.toml promises; a test compares the
committed code with fresh output.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent


def generate(out: Path) -> None:
    """Write `swarm/pb/*_pb2.py` and `*_pb2.pyi` under `out`."""
    files = sorted((ROOT / "swarm" / "pb").glob("*.proto"))
    out.mkdir(parents=True, exist_ok=True)
    arguments = ["protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}", *map(str, files)]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed; its messages are above")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=Path, default=ROOT.parent, help="write under this folder, not the project")
    generate(parser.parse_args().check)
