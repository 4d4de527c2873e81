"""`swarm demo`: the whole product on one machine, in two minutes, with faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarm.cli.report import reports_errors
from swarm.cli.stopping import interrupted_by_termination


@reports_errors
def command(
    steps: Annotated[int, typer.Option(help="Training steps of each trainer.")] = 600,
    hosts: Annotated[int, typer.Option(help="Processes that hold experts.")] = 4,
    trainers: Annotated[int, typer.Option(help="Processes that train.")] = 3,
    experts: Annotated[int, typer.Option(help="Experts in total; a product of two numbers, such as 16.")] = 16,
    data: Annotated[
        Path | None,
        typer.Option(help="Text to learn; default: the documentation topics that ship with Python.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes data order and initial weights.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="`cpu`, `cuda` or `auto`.")] = "cpu",
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Leave the processes alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on standard output, nothing else.")] = False,
) -> None:
    """Train a small language model with many processes on this machine, some of which fail.

    A bootstrap peer, hosts with the experts of a mixture-of-experts layer and trainers find each other and train a
    byte-level model. On the way the demo freezes a host, kills a host and a trainer, and restarts the trainer, which
    downloads the state from another one and goes on. Takes about two minutes; leaves nothing behind.

    **Examples**

    `swarm demo`

    `swarm demo --data book.txt --steps 1000`

    `swarm demo --json | python -m json.tool`
    """
    from swarm.demo.options import DemoOptions
    from swarm.demo.orchestrator import run_demo
    from swarm.demo.view import DemoView, summary

    options = DemoOptions(
        steps=steps,
        hosts=hosts,
        trainers=trainers,
        experts=experts,
        data=data,
        seed=seed,
        device=device,
        faults=not no_faults,
    )
    with interrupted_by_termination(), DemoView(sys.stderr if as_json else sys.stdout) as view:
        result = run_demo(options, view)
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        ascii_only = "utf" not in (sys.stdout.encoding or "").lower()
        print(summary(result, ascii_only), flush=True)
    if not result["ok"]:
        raise typer.Exit(1)
