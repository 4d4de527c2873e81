"""`LocalSwarm`: a run of real processes on this machine, with faults at will. For tests, demos and trials."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from swarm.errors import ProcessError, UsageError
from swarm.simulation.children import ChildProcess, spawn
from swarm.simulation.proxy import ProxyProcess, free_port
from swarm.simulation.status import STOP_GRACE_S, ProcessConfig, ProcessKind

if TYPE_CHECKING:
    from swarm.config import PeerConfig
    from swarm.experts.spec import ExpertGrid
    from swarm.observe.report import SwarmView
    from swarm.peer import Peer
    from swarm.run import Run

VIEW_INTERVAL_S = 0.2
INVITED_ROLES = ("host", "trainer", "monitor")


class LocalSwarm:
    """Hosts and trainers as separate processes of one run, started on entry and removed on exit.

    Processes are named `host-0`, `host-1`, ..., `trainer-0`, ... (and `bootstrap`, if it has a process of its own).
    They notice the end of this process, whatever its cause, and leave; a small warden process removes frozen ones and
    the working directory even then.

    ```python
    with LocalSwarm(experts=[grid], hosts=3) as s, s.peer(role="trainer") as peer:
        s.kill("host-1")
        s.wait_until(lambda view: view.min_replicas("ffn") == 2, timeout_s=30)
    ```

    Args:
        experts: The grids of the run.
        hosts: Number of host processes.
        trainers: Number of trainer processes, each of which calls `train`.
        train: `module:function`, called as `function(peer, **train_args)` in each trainer process; the process ends
            when it returns.
        train_args: JSON-able keyword arguments for `train`.
        imports: Modules that register expert classes. Those of the grids' own classes are added.
        seed: Seeds torch in every process and, with the preset `local`, the run key, which decides the experts' initial
            weights.
        preset: Preset of every peer's `PeerConfig`.
        config: Changes to the preset, for every peer.
        bootstrap: Where the first peer lives: in the calling process, or in a process of its own.
        links: Put a link in front of every process, so that `shape` can make it slow, far or broken.
        torch_threads: Compute threads of every process.
        start_timeout_s: Patience for all processes to join the run.
        name: The run's name.
    """

    def __init__(
        self,
        experts: Sequence[ExpertGrid] = (),
        hosts: int = 3,
        trainers: int = 0,
        *,
        train: str | None = None,
        train_args: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        seed: int = 0,
        preset: Literal["local", "lan", "wan"] = "local",
        config: Mapping[str, Any] | None = None,
        bootstrap: Literal["caller", "process"] = "caller",
        links: bool = False,
        torch_threads: int = 1,
        start_timeout_s: float = 60.0,
        name: str = "local",
    ) -> None:
        if hosts < 0 or trainers < 0:
            raise UsageError("The number of hosts and trainers cannot be negative.")
        if trainers and not train:
            raise UsageError("Trainer processes need something to do.", fix='Pass train="module:function".')
        if "data_dir" in (config or {}):
            raise UsageError("Every process of a local swarm has its own data directory.", fix="Leave data_dir out.")
        self.name = name
        self.experts = tuple(experts)
        self.seed = seed
        self._counts: dict[ProcessKind, int] = {"host": hosts, "trainer": trainers}
        self._train, self._train_args = train or "", dict(train_args or {})
        self._imports = [*imports, *_modules_of(self.experts, imports)]
        self._preset, self._overrides = preset, dict(config or {})
        self._bootstrap = bootstrap
        self._wants_links = links
        self.links: ProxyProcess | None = None
        """The links in front of all processes, by name."""
        self._torch_threads = torch_threads
        self._start_timeout_s = start_timeout_s
        self._children: dict[str, ChildProcess] = {}
        self._timers: list[threading.Timer] = []
        self._peers: list[Peer] = []
        self._monitor: Peer | None = None
        self._run: Run | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._dir: Path | None = None
        self._stack = ExitStack()

    # Lifetime

    def start(self) -> Self:
        """Start everything and wait until every process has joined. Raises `ProcessError` naming who failed at what."""
        if self._dir is not None:
            raise UsageError("This local swarm was started already.", fix="Create a new one.")
        self._dir = Path(tempfile.mkdtemp(prefix="swarm-local-")).resolve()
        self._stack.callback(self._remove)
        try:
            self._warden = spawn(["swarm.simulation.warden", str(self._dir)])
            if self._wants_links:
                self.links = ProxyProcess(self.seed)
            self._start_bootstrap()
            children = [self._prepare(kind, i) for kind, count in self._counts.items() for i in range(count)]
            self._start_all(children)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Stop every process and peer, and remove every file. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self.start() if self._dir is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_bootstrap(self) -> None:
        if self._bootstrap == "process":
            child = self._prepare("bootstrap", None)
            self._start_all([child])
            self._invites = {str(k): str(v) for k, v in child.details["invites"].items()}
            self._ticket = str(child.details["ticket"])
            return
        from swarm.experts.registry import import_modules
        from swarm.run import create_run, run_key_from_seed

        import_modules(self._imports)
        run_key = run_key_from_seed(self.seed) if self._preset == "local" else None
        run = create_run(self.name, self.experts, config=self._peer_config("bootstrap"), run_key=run_key)
        self._run = run
        self._invites = {role: run.invite(role=role) for role in INVITED_ROLES}
        self._ticket = run.ticket

    def _prepare(self, kind: ProcessKind, index: int | None) -> ChildProcess:
        name = kind if index is None else f"{kind}-{index}"
        create = {"name": self.name, "experts": [grid.to_dict() for grid in self.experts], "roles": list(INVITED_ROLES)}
        config = ProcessConfig(
            name=name,
            kind=kind,
            directory=str(self.directory / name),
            invite="" if kind == "bootstrap" else self._invites[kind],
            create=create if kind == "bootstrap" else {},
            imports=self._imports,
            train=self._train if kind == "trainer" else "",
            train_args=self._train_args if kind == "trainer" else {},
            preset=self._preset,
            overrides=self._overrides if self.links is None else self._behind_link(self.links, name),
            torch_threads=self._torch_threads,
            seed=self.seed,
            sys_path=[entry or "." for entry in sys.path],
        )
        child = ChildProcess(config)
        self._children[name] = child
        return child

    def _behind_link(self, links: ProxyProcess, name: str) -> dict[str, Any]:
        """The changes to the preset with which a process listens behind a new link."""
        port = free_port()
        address = links.add(name, f"127.0.0.1:{port}")
        transport = {**self._overrides.get("transport", {}), "listen_host": "127.0.0.1", "port": port}
        return {**self._overrides, "transport": {**transport, "announce": [address]}}

    def _start_child(self, child: ChildProcess) -> None:
        child.start()
        if self.links is not None:
            self.links.own(child.name, child.pid)

    def _start_all(self, children: Sequence[ChildProcess]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        for child in children:
            self._start_child(child)
        for child in children:
            child.wait_ready(max(0.1, deadline - time.monotonic()))

    def _remove(self) -> None:
        """Undo everything that `start` did, each part even if another one fails."""
        with ExitStack() as stack:
            stack.callback(self._dismiss_warden)
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            if self.links is not None:
                stack.callback(self.links.close)
            if self._run is not None:
                stack.callback(self._run.close)
            for child in self._children.values():
                stack.callback(child.stop)
            for child in self._children.values():
                stack.callback(child.request_stop)
            for peer in self._peers:
                stack.callback(peer.close)
            for timer in self._timers:
                timer.cancel()

    def _dismiss_warden(self) -> None:
        if self._warden is None:
            return
        try:
            self._warden.communicate(b"done\n", timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._warden.kill()
            self._warden.communicate()

    # Access

    @property
    def directory(self) -> Path:
        """Where the processes keep their files; removed by `close`. Processes may share files in it."""
        if self._dir is None:
            raise UsageError("This local swarm was not started.", fix="Use it in a with statement, or call start().")
        return self._dir

    @property
    def ticket(self) -> str:
        """The run's public address."""
        return self._ticket

    def invite(self, role: str) -> str:
        """An invite with which further peers can join the run as `role`."""
        if role not in self._invites:
            raise UsageError(f"There is no invite for {role!r}.", fix=f"Roles are {', '.join(self._invites)}.")
        return self._invites[role]

    def names(self, kind: str | None = None) -> list[str]:
        """The processes' names, of one kind or of all, in the order of their start."""
        return [name for name, child in self._children.items() if kind is None or child.config.kind == kind]

    def state(self, name: str) -> str:
        """`starting`, `ready`, `frozen`, `killed`, `left`, `done` (training returned) or `failed`."""
        return self._child(name).state

    def peer_id(self, name: str) -> str:
        """The identity of a process, written out. It survives restarts."""
        peer_id = self._child(name).peer_id
        if peer_id is None:
            raise ProcessError(f"{name} has not joined the run yet.")
        return peer_id

    def pid(self, name: str) -> int:
        """The process id of this peer."""
        return self._child(name).pid

    def logs(self, name: str) -> str:
        """Everything the process printed so far."""
        return self._child(name).logs()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The peer's events so far, as dicts with `kind`, `time_s` and the event's fields."""
        return self._child(name).events()

    def events_since(self, name: str, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Events from `offset` (0 at first) on, and the offset to continue from."""
        return self._child(name).events_since(offset)

    def peer(self, role: str = "trainer", name: str | None = None) -> Peer:
        """A peer of the run in the calling process; a context manager, closed with the swarm at the latest."""
        from swarm.experts.registry import import_modules
        from swarm.run import join

        import_modules(self._imports)
        config = self._peer_config(name or f"{role}-in-caller-{len(self._peers)}")
        peer = join(self.invite(role), role, config=config)
        self._peers.append(peer)
        return peer

    def _peer_config(self, name: str) -> PeerConfig:
        from swarm.config import PeerConfig

        return PeerConfig.preset(self._preset, name=name, **self._overrides)

    def _child(self, name: str) -> ChildProcess:
        if name not in self._children:
            raise UsageError(f"There is no process {name!r}.", fix=f"There are {', '.join(self._children) or 'none'}.")
        return self._children[name]

    # Observation

    def view(self) -> SwarmView:
        """What the DHT lists now, without processes that are known to be dead."""
        from swarm.observe.collect import read_view

        if self._run is not None:
            watcher = self._run.bootstrap
        else:
            if self._monitor is None:
                self._monitor = self.peer(role="monitor", name="monitor")
            watcher = self._monitor
        view = watcher.run_sync(read_view(watcher, self.experts), timeout_s=30.0)
        return view.without(c.peer_id for c in self._children.values() if c.peer_id is not None and not c.running)

    def wait_until(self, predicate: Callable[[SwarmView], bool], timeout_s: float = 30.0) -> SwarmView:
        """Wait until the view satisfies `predicate` and return that view. Raises `ProcessError` with the last view."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = self.view()
            if predicate(view):
                return view
            if time.monotonic() >= deadline:
                states = ", ".join(f"{name} {child.state}" for name, child in self._children.items())
                raise ProcessError(
                    f"The swarm did not get there within {timeout_s:g} s. Processes: {states}. View: {view}"
                )
            time.sleep(VIEW_INTERVAL_S)

    def wait(self, name: str, timeout_s: float = 60.0) -> int:
        """Wait until a process has ended by itself and return its exit code. Raises `ProcessError`."""
        return self._child(name).wait(timeout_s)

    # Faults

    def kill(self, name: str) -> None:
        """End a process at once (SIGKILL): nothing is handed over, nothing is withdrawn."""
        self._child(name).kill()

    def freeze(self, name: str, seconds: float | None = None) -> None:
        """Suspend a process, for `seconds` or until `thaw`. Returns at once."""
        self._child(name).freeze()
        if seconds is not None:
            timer = threading.Timer(seconds, self._child(name).thaw)
            timer.daemon = True
            self._timers.append(timer)
            timer.start()

    def thaw(self, name: str) -> None:
        """Let a frozen process go on."""
        self._child(name).thaw()

    def shape(self, name: str, **changes: Any) -> None:
        """Change the `Shape` of a process's link, e.g. `latency_ms=50, up_mbit=10`; `links` can break it too."""
        self._child(name)
        if self.links is None:
            raise UsageError("The processes have no links.", fix="Start the swarm with links=True.")
        self.links.shape(name, **changes)

    def stop(self, name: str) -> None:
        """Let a process leave cleanly, and wait for it."""
        self._child(name).stop()

    def restart(self, name: str, wait: bool = True) -> None:
        """Start a process again after it ended, with the same identity and data; `wait` until it has joined."""
        child = self._child(name)
        self._start_child(child)
        if wait:
            child.wait_ready(self._start_timeout_s)

    def add(self, kind: Literal["host", "trainer"], wait: bool = True) -> str:
        """Start one more process and return its name."""
        child = self._prepare(kind, len(self.names(kind)))
        self._start_child(child)
        if wait:
            child.wait_ready(self._start_timeout_s)
        return child.name


def _modules_of(experts: Sequence[ExpertGrid], known: Sequence[str]) -> list[str]:
    """The modules that register the grids' classes in this process, so that the child processes import them too."""
    from swarm.experts.spec import registered

    modules: list[str] = []
    for grid in experts:
        entry = registered.get(grid.module_name)
        module = entry.cls.__module__ if entry is not None else None
        if module is None or module in (*known, *modules) or module.startswith("swarm.experts"):
            continue
        if module == "__main__":
            script = getattr(sys.modules["__main__"], "__file__", None)
            if script is None or not script.endswith(".py"):
                raise UsageError(
                    f"The expert class {grid.module_name!r} is defined where host processes cannot import it.",
                    fix="Move the class into a module.",
                )
            module = str(Path(script).resolve())
            if module in (*known, *modules):
                continue
        modules.append(module)
    return modules
