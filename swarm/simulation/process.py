"""Entry point of one process of a local swarm: `python -m swarm.simulation.process CONFIG.json`.

It joins the run (a bootstrap process creates it), hosts or trains, and leaves when its standard input says `stop` or
ends, which it does when the parent dies.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil

from swarm.errors import SwarmError, UsageError
from swarm.simulation.status import (
    EVENTS_FILE,
    PID_FILE,
    STATUS_FILE,
    STOP_COMMAND,
    STOP_GRACE_S,
    ProcessConfig,
    append_json,
)

if TYPE_CHECKING:
    from swarm.config import PeerConfig
    from swarm.events import EventStream


class Stage:
    """Tells the parent how far this process has come."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.current = "starting"

    def set(self, stage: str, **details: Any) -> None:
        self.current = stage
        append_json(self._file, {"stage": stage, "pid": os.getpid(), **details})


class StopRequest:
    """Set when the parent asks us to leave or is gone. `training` says whether the main thread must be interrupted."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._training = False

    def begin_training(self) -> None:
        with self._lock:
            if self.event.is_set():
                raise KeyboardInterrupt
            self._training = True

    def end_training(self) -> None:
        with self._lock:
            self._training = False

    def watch(self) -> None:
        """Read standard input until it says stop or ends. Runs on a thread of its own."""
        for line in sys.stdin:
            if line.strip() == STOP_COMMAND:
                break
        with self._lock:
            self.event.set()
            if self._training:
                _interrupt_main_thread()
        threading.Event().wait(STOP_GRACE_S)
        os._exit(70)


def _interrupt_main_thread() -> None:
    pthread_kill = getattr(signal, "pthread_kill", None)
    ident = threading.main_thread().ident
    if pthread_kill is not None and ident is not None:
        pthread_kill(ident, signal.SIGINT)  # also wakes a wait on a lock, which interrupt_main does not
    else:
        import _thread

        _thread.interrupt_main()


def resolve_function(spec: str) -> Any:
    """The object that `module:function` names. Raises `UsageError`."""
    module_name, separator, attribute = spec.partition(":")
    if not separator or not attribute:
        raise UsageError(f"{spec!r} does not name a function.", fix="Write it as module:function.")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{spec!r} cannot be imported: {error}", fix="Check the module search path.") from error


def run_process(config: ProcessConfig, stage: Stage, stop: StopRequest) -> None:
    """Live the life of one peer, from joining to leaving."""
    stage.set("importing torch and swarm")
    import torch

    torch.set_num_threads(config.torch_threads)
    torch.manual_seed(config.seed)
    from swarm.clock import SystemClock
    from swarm.config import PeerConfig, PresetName
    from swarm.events import EventStream
    from swarm.experts.registry import import_modules
    from swarm.run import join

    stage.set(f"importing {', '.join(config.imports) or 'nothing else'}")
    import_modules(config.imports)
    train = resolve_function(config.train) if config.kind == "trainer" else None
    peer_config = PeerConfig.preset(
        cast(PresetName, config.preset), name=config.name, data_dir=config.path / "data", **config.overrides
    )
    events = EventStream(SystemClock())
    events.write_to(config.path / EVENTS_FILE)
    if config.kind == "bootstrap":
        _bootstrap(config, peer_config, events, stage, stop)
        return
    stage.set("joining the run")
    with join(config.invite, config.kind, config=peer_config, events=events) as peer:
        stage.set("ready", peer_id=str(peer.peer_id))
        if train is None:
            stop.event.wait()
        else:
            stage.set("training")
            stop.begin_training()
            try:
                train(peer, **config.train_args)
            finally:
                stop.end_training()
        stage.set("leaving")


def _bootstrap(
    config: ProcessConfig, peer_config: PeerConfig, events: EventStream, stage: Stage, stop: StopRequest
) -> None:
    from swarm.experts.spec import ExpertGrid
    from swarm.run import create_run, run_key_from_seed

    stage.set("creating the run")
    grids = [ExpertGrid.from_dict(grid) for grid in config.create["experts"]]
    run_key = run_key_from_seed(config.seed) if config.preset == "local" else None
    with create_run(config.create["name"], grids, config=peer_config, run_key=run_key, events=events) as run:
        invites = {role: run.invite(role) for role in config.create["roles"]}
        stage.set("ready", peer_id=str(run.bootstrap.peer_id), ticket=run.ticket, invites=invites)
        stop.event.wait()
        stage.set("leaving")


def main(argv: list[str]) -> int:
    config = ProcessConfig.read(Path(argv[0]))
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have passed on "ignore"
    sys.path.extend(entry for entry in config.sys_path if entry not in sys.path)
    me = psutil.Process()
    (config.path / PID_FILE).write_text(json.dumps({"pid": me.pid, "created": me.create_time()}), "utf-8")
    stage = Stage(config.path / STATUS_FILE)
    stop = StopRequest()
    threading.Thread(target=stop.watch, name="swarm-parent-watch", daemon=True).start()
    try:
        run_process(config, stage, stop)
    except KeyboardInterrupt:
        stage.set("left")
        return 0
    except Exception as error:  # noqa: BLE001 - the last frame of the process: told to the parent and logged
        traceback.print_exc()
        text = str(error) if isinstance(error, SwarmError) else repr(error)
        stage.set("failed", during=stage.current, error=text)
        return 1
    stage.set("left" if stop.event.is_set() else "done")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of users' training code must not keep the process
