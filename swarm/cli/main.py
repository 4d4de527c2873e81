"""The `swarm` command. Each command is a module of its own, imported when it is needed, so that help is instant."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "create": "swarm.cli.create",
    "join": "swarm.cli.join",
    "demo": "swarm.cli.demo",
    "dht": "swarm.cli.dht",
}
"""Command name -> module with a `command` function that typer can turn into a command, or a `group` of commands."""
_HELP_TOO = {"help_option_names": ["--help", "-h"]}


class _LazyCommands(TyperGroup):
    """Finds commands by name in `COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name])
        if hasattr(module, "group"):
            return typer.main.get_command(module.group)
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        single.command(cmd_name, context_settings=_HELP_TOO)(module.command)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyCommands,
    name="swarm",
    no_args_is_help=True,
    context_settings=_HELP_TOO,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from swarm import __version__
        from swarm.net.transport import PROTOCOL_VERSION

        typer.echo(f"swarm {__version__} (protocol {PROTOCOL_VERSION})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train one PyTorch model together over the internet, on machines that come, go, stall and lie.

    **Try it on this machine:** `swarm demo`

    **Help to train:** `swarm join INVITE` hosts experts until Ctrl-C. The owner of a run gives you the invite.

    **Start a run:** `swarm create run.toml` starts its first peer and prints invites.

    **Look into a run:** `swarm dht peers INVITE` lists who is there, `swarm dht get KEY INVITE` what is published.

    Exit codes: 0 done, 2 usage or configuration, 3 network, 4 identity or invite, 5 bad data from a peer, 6 records,
    7 experts, 8 averaging, 9 state, 10 child processes, 130 aborted by a second Ctrl-C.
    """


def main() -> None:
    """Entry point of the `swarm` console script."""
    app()


if __name__ == "__main__":
    main()
