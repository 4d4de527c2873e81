"""Finds registered expert classes and optimizers, checks grids against them, builds experts with their initial weights.

A host never runs code that its user did not install: classes come from this package, from packages with an entry point
in the group `swarm.experts`, and from modules that the user names (`--import MODULE`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarm.errors import ConfigError, UnknownExpertClassError, UnknownOptimizerError
from swarm.experts.seeding import PrivateRandomness, expert_seed
from swarm.experts.spec import (
    OPTIMIZER_NAMES,
    ExpertGrid,
    RegisteredExpert,
    TensorSpec,
    optimizer_factories,
    registered,
)

ENTRY_POINT_GROUP = "swarm.experts"
_PROBE_SIZES = (3, 5)


@dataclass(frozen=True, slots=True)
class ExpertProfile:
    """What is known about a grid's experts without building one (found on the meta device).

    Attributes:
        inputs, outputs: Specs of `forward`'s arguments and results.
        single: `forward` returns a tensor, not a tuple of tensors.
        parameter_bytes, parameters: Size of one expert's parameters and buffers, number of parameter elements.
        trainable: Shapes of the parameters that are trained.
        graph_bytes: What autograd keeps for a backward pass, per token (a lower bound for modules with fused kernels).
        random: Training draws random numbers (dropout), so that calls are computed one by one and replayed by seed.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    single: bool
    parameter_bytes: int
    parameters: int
    trainable: tuple[tuple[int, ...], ...]
    graph_bytes: int
    random: bool


@lru_cache(maxsize=1)
def _load_installed() -> None:
    """Import the built-ins and every installed entry point, once."""
    importlib.import_module("swarm.experts.layers")
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry.load()
        except ImportError as error:
            raise ConfigError(
                f"The expert plug-in {entry.value} cannot be imported: {error}", fix="Reinstall or remove its package."
            ) from error


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register expert classes: dotted names, or paths of `.py` files.

    Raises:
        ConfigError: A module cannot be imported.
    """
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name))
            else:
                importlib.import_module(name)
        except (ImportError, OSError, SyntaxError) as error:
            fix = "Check the file." if name.endswith(".py") else f"Install it, or name its file, as in {name}.py."
            raise ConfigError(f"The module {name!r} cannot be imported: {error}", fix=fix) from error


def _import_file(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)


def resolve(name: str) -> RegisteredExpert:
    """The expert class registered under `name`.

    Raises:
        UnknownExpertClassError: No installed or imported module registers it.
    """
    if name not in registered:
        _load_installed()
    if name not in registered:
        raise UnknownExpertClassError(
            f"No expert class {name!r} is installed; there are {', '.join(sorted(registered))}.",
            fix="Install the package that defines it, or import its module (--import, or `imports` in run.toml).",
        )
    return registered[name]


def full_config(grid: ExpertGrid) -> dict[str, Any]:
    """The grid's config, completed with the defaults of the class's constructor.

    Raises:
        ConfigError: The constructor does not accept the config.
    """
    entry = resolve(grid.module_name)
    signature = inspect.signature(entry.cls.__init__)
    try:
        bound = signature.bind(None, **grid.config)
    except TypeError as error:
        raise ConfigError(
            f"{entry.name!r} does not accept the config of {grid.pattern!r}: {error}.", fix="Correct the grid's config."
        ) from error
    bound.apply_defaults()
    config = dict(bound.arguments)
    del config[next(iter(config))]  # self
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            config.update(config.pop(parameter.name))
    return config


def input_specs(grid: ExpertGrid) -> tuple[TensorSpec, ...]:
    """Specs of the inputs of the grid's experts. Raises `ConfigError`, `UnknownExpertClassError`."""
    entry = resolve(grid.module_name)
    try:
        specs = tuple(entry.inputs(full_config(grid)))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"The inputs of {entry.name!r} cannot be derived from its config: {error!r}.") from error
    if not specs or not all(isinstance(s, TensorSpec) for s in specs):
        raise ConfigError(f"The inputs of {entry.name!r} are not a list of TensorSpec.")
    return specs


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `float32`. Raises `ConfigError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"torch has no dtype {name!r}.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


_dtype_names: dict[torch.dtype, str] = {}


def profile(grid: ExpertGrid) -> ExpertProfile:
    """Build one expert on the meta device, run it, and say what it takes and gives. Cached by class and config.

    Raises:
        ConfigError: The class cannot be built or run with the config, or its outputs are not rows of its inputs.
        UnknownExpertClassError: The class is not registered here.
    """
    key = (grid.module_name, repr(sorted(grid.config.items())), resolve(grid.module_name).cls)
    if key not in _profiles:
        if len(_profiles) >= 256:
            _profiles.clear()
        _profiles[key] = _probe(grid)
    return _profiles[key]


_profiles: dict[tuple[str, str, type[nn.Module]], ExpertProfile] = {}


def _probe(grid: ExpertGrid) -> ExpertProfile:
    specs = input_specs(grid)
    randomness = PrivateRandomness(0)
    try:
        with torch.device("meta"):
            module = resolve(grid.module_name).cls(**grid.config)
        module.train()
        runs: list[tuple[list[torch.Tensor], bool, int]] = []
        with randomness:
            randomness.draws = 0
            for size in _PROBE_SIZES:
                runs.append(_probe_run(module, specs, size))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The expert class {grid.module_name!r} fails with the config {dict(grid.config)}: {error}",
            fix="Correct the config or the class; it must also run on torch's meta device.",
        ) from error
    (first, single, small), (second, _, large) = runs
    if any(p.dtype is torch.float16 for p in module.parameters()):
        raise ConfigError(
            f"The parameters of {grid.module_name!r} are float16, in which optimizer steps overflow.",
            fix="Use float32 or bfloat16 parameters.",
        )
    outputs = tuple(_output_spec(grid, a, b) for a, b in zip(first, second, strict=True))
    state = [*module.parameters(), *module.buffers()]
    return ExpertProfile(
        inputs=specs,
        outputs=outputs,
        single=single,
        parameter_bytes=sum(t.numel() * t.element_size() for t in state),
        parameters=sum(p.numel() for p in module.parameters()),
        trainable=tuple(tuple(p.shape) for p in module.parameters() if p.requires_grad),
        graph_bytes=max(0, (large - small) // (_PROBE_SIZES[1] - _PROBE_SIZES[0])),
        random=randomness.draws > 0,
    )


def _probe_run(module: nn.Module, specs: Sequence[TensorSpec], size: int) -> tuple[list[torch.Tensor], bool, int]:
    """Outputs, whether they are a single tensor, and bytes kept for backward, at `size` for every None."""
    inputs = []
    for spec in specs:
        shape = [size if s is None else s for s in spec.shape]
        dtype = torch_dtype(spec.dtype)
        inputs.append(torch.zeros(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point))
    parameters = {id(p) for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in parameters:
            kept[id(t)] = t
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = module(*inputs)
    single = isinstance(result, torch.Tensor)
    outputs = [result] if single else list(result)
    if not outputs or not all(isinstance(o, torch.Tensor) and o.dim() > 0 for o in outputs):
        raise ConfigError("An expert returns one tensor or a tuple of tensors, each with a size for its tokens.")
    return outputs, single, sum(t.numel() * t.element_size() for t in kept.values())


def _output_spec(grid: ExpertGrid, small: torch.Tensor, large: torch.Tensor) -> TensorSpec:
    if (small.shape[0], large.shape[0]) != _PROBE_SIZES:
        raise ConfigError(
            f"{grid.module_name!r} turns {_PROBE_SIZES[0]} tokens into {small.shape[0]} rows.",
            fix="An expert's outputs have one row per token, first.",
        )
    rest = tuple(a if a == b else None for a, b in zip(small.shape[1:], large.shape[1:], strict=True))
    return TensorSpec((None, *rest), dtype_name(small.dtype))


def output_specs(grid: ExpertGrid) -> tuple[TensorSpec, ...]:
    """Specs of what the grid's experts return, inferred on the meta device. Raises like `profile`."""
    return profile(grid).outputs


def resolve_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The torch class, or the factory that a module registered, under `name`.

    Raises:
        UnknownOptimizerError: Neither exists here.
    """
    if name in OPTIMIZER_NAMES:
        for attribute, value in vars(torch.optim).items():
            if attribute.lower() == name and inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
                return value
        raise UnknownOptimizerError(f"torch {torch.__version__} has no {name!r}.", fix="Upgrade torch.")
    if name not in optimizer_factories:
        _load_installed()
    if name not in optimizer_factories:
        raise UnknownOptimizerError(
            f"No optimizer {name!r} is installed; torch has {', '.join(OPTIMIZER_NAMES)}.",
            fix="Install the package that defines it, or import its module (--import, or `imports` in run.toml).",
        )
    return optimizer_factories[name]


def build_optimizer(grid: ExpertGrid, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer that hosts train an expert with; none for an expert without trainable parameters.

    Raises:
        ConfigError: It does not accept the arguments or the parameters.
        UnknownOptimizerError: There is no such optimizer here.
    """
    name = grid.optimizer.name
    make = resolve_optimizer(name)
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        return None
    if name == "muon" and (odd := [tuple(p.shape) for p in trainable if p.dim() != 2]):
        raise ConfigError(
            f"Muon trains matrices only; {grid.module_name!r} has parameters of shape {odd[0]}.",
            fix="Use another optimizer, or register a factory that leaves them to one (@swarm.optimizer).",
        )
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in grid.optimizer.arguments.items()}
    try:
        optimizer = make(trainable, **arguments)
    except Exception as error:
        raise ConfigError(
            f"The optimizer {name!r} does not accept {arguments}: {error}.", fix="Correct the grid's OptimizerSpec."
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"The factory {name!r} returned no torch optimizer but a {type(optimizer).__name__}.")
    return optimizer


def _try_optimizer(grid: ExpertGrid, shapes: Sequence[tuple[int, ...]]) -> None:
    """A step with small parameters of the same dimensions. Raises like `build_optimizer`."""
    parameters = [nn.Parameter(torch.zeros([min(size, 2) for size in shape])) for shape in shapes]
    optimizer = build_optimizer(grid, parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        if optimizer is not None:
            optimizer.step()
    except Exception as error:
        raise ConfigError(
            f"The optimizer {grid.optimizer.name!r} cannot make a step: {error}.",
            fix="Correct the grid's OptimizerSpec; optimizers step without a closure here.",
        ) from error


def check_grid(grid: ExpertGrid) -> ExpertProfile:
    """Fail early: the class is registered, its config works, its outputs have a row per token, its optimizer exists.

    Raises:
        ConfigError, UnknownExpertClassError, UnknownOptimizerError: As above.
    """
    result = profile(grid)
    _try_optimizer(grid, result.trainable)
    return result


def build_expert(grid: ExpertGrid, uid: str, run_id: bytes, device: torch.device | str = "cpu") -> nn.Module:
    """A new expert with the initial weights that this run defines for `uid`, in training mode.

    The weights are those that `torch.manual_seed(expert_seed(run_id, uid))` would lead to on a CPU. The process's own
    random state is neither read nor changed.

    Raises:
        ConfigError, UnknownExpertClassError: The class is not registered or does not accept the config.
    """
    entry = resolve(grid.module_name)
    full_config(grid)
    with PrivateRandomness(expert_seed(run_id, uid)):
        module = entry.cls(**grid.config)
    return module.to(device).train()
