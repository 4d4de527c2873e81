"""Descriptions of experts that travel in a manifest: tensor specs, optimizers, grids, and the registering decorator.

Nothing here imports torch, so that a manifest can be read, signed and shown quickly.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.errors import ConfigError, MalformedFrameError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

MAX_EXPERTS_PER_GRID = 1 << 20
MAX_UID_CHARS = 128
OPTIMIZER_NAMES = (
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd"),
    *("muon", "nadam", "radam", "rmsprop", "rprop", "sgd"),
)
"""What torch ships: its optimizers that step without a closure, with dense gradients. `muon` takes matrices only."""
SCHEDULES = ("constant", "linear", "cosine")
MAX_STEPS = 1 << 40

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_UID = re.compile(r"([A-Za-z_][A-Za-z0-9_-]{0,63})((?:\.(?:0|[1-9][0-9]{0,8}))*)")
_RANGE = re.compile(r"\[0:([1-9][0-9]{0,8})\]")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,30}")

ModuleClass = TypeVar("ModuleClass", bound="type[nn.Module]")
OptimizerFactory = TypeVar("OptimizerFactory", bound="Callable[..., Optimizer]")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one input or output of an expert.

    Args:
        shape: Sizes; the first is None and stands for the tokens (or samples) of a call, which an expert must treat
            independently of each other, because a host computes several calls as one batch. Further None sizes may
            differ from call to call.
        dtype: Name of a torch dtype, e.g. `float32`.

    Raises:
        ConfigError: The shape does not start with None, a size is negative, or the dtype is not a name.
    """

    shape: tuple[int | None, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or self.shape[0] is not None:
            raise ConfigError(
                f"The shape {self.shape} does not start with None.",
                fix="The first size of a TensorSpec is None: the tokens of a call.",
            )
        if any(size is not None and (type(size) is not int or size < 0) for size in self.shape):
            raise ConfigError(f"The shape {self.shape} has a size that is neither None nor a whole number >= 0.")
        if not isinstance(self.dtype, str) or not _DTYPE.fullmatch(self.dtype):
            raise ConfigError(f"{self.dtype!r} is not a dtype's name.", fix="Write it as 'float32' or 'bfloat16'.")

    def matches(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether a tensor of this shape and dtype name fits."""
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(want is None or want == got for want, got in zip(self.shape, shape, strict=True))
        )

    def __str__(self) -> str:
        sizes = ["tokens", *("?" if s is None else str(s) for s in self.shape[1:])]
        return f"{self.dtype}[{', '.join(sizes)}]"


@dataclass(frozen=True, slots=True)
class RegisteredExpert:
    """An expert class that this process may instantiate, because its user installed it.

    Attributes:
        name: What manifests call it.
        cls: The module class; its constructor takes the grid's `config` as keyword arguments.
        inputs: From the config (completed with the constructor's defaults) to the specs of `forward`'s arguments.
    """

    name: str
    cls: type[nn.Module]
    inputs: Callable[[dict[str, Any]], Sequence[TensorSpec]]


registered: dict[str, RegisteredExpert] = {}
"""Every expert class of this process by name; look classes up with `swarm.experts.registry.resolve`."""


def expert(
    name: str, *, inputs: Callable[[dict[str, Any]], Sequence[TensorSpec]]
) -> Callable[[ModuleClass], ModuleClass]:
    """Register a module class as an expert that hosts of this process may hold.

    Args:
        name: What manifests call the class; letters, digits, `_` and `-`.
        inputs: From the expert's config to one `TensorSpec` per argument of `forward`. Outputs are inferred.

    Raises:
        ConfigError: The name is malformed, or another class has it.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name an expert class.", fix="Use letters, digits, '_' and '-', at most 64.")

    def register(cls: ModuleClass) -> ModuleClass:
        known = registered.get(name)
        # the same class defined again (a reloaded module, `python -m`) replaces itself
        if known is not None and known.cls.__qualname__ != cls.__qualname__:
            raise ConfigError(f"The expert name {name!r} is taken by {known.cls.__qualname__}.", fix="Choose another.")
        registered[name] = RegisteredExpert(name, cls, inputs)
        return cls

    return register


optimizer_factories: dict[str, Callable[..., Optimizer]] = {}
"""Every optimizer factory of this process by name."""


def optimizer(name: str) -> Callable[[OptimizerFactory], OptimizerFactory]:
    """Register a function (or class) as an optimizer that hosts of this process may train experts with.

    It is called with a list of parameters and the `OptimizerSpec`'s arguments as keywords, and returns a
    `torch.optim.Optimizer` that steps without a closure. Like expert classes, factories come from packages with an
    entry point in the group `swarm.experts` and from modules that the user names: a host never runs code that its user
    did not install.

    Args:
        name: What an `OptimizerSpec` calls it; letters, digits, `_` and `-`; none of `OPTIMIZER_NAMES`.

    Raises:
        ConfigError: The name is malformed, torch's, or another factory has it.
    """
    if not _NAME.fullmatch(name) or name in OPTIMIZER_NAMES:
        raise ConfigError(f"{name!r} cannot name an optimizer of your own.", fix="Choose another name.")

    def register(factory: OptimizerFactory) -> OptimizerFactory:
        known = optimizer_factories.get(name)
        if known is not None and _qualname(known) != _qualname(factory):
            raise ConfigError(f"The optimizer name {name!r} is taken by {_qualname(known)}.", fix="Choose another.")
        optimizer_factories[name] = factory
        return factory

    return register


def _qualname(value: object) -> str:
    return getattr(value, "__qualname__", repr(value))


def _as_json(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A copy as JSON would return it, so that a description equals itself after a journey."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(dict(values), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} holds a value that JSON cannot carry: {error}.") from error
    return copy


@dataclass(frozen=True, init=False)
class OptimizerSpec:
    """The optimizer that a host runs for each expert.

    Args:
        name: One of `OPTIMIZER_NAMES` (the lowercase name of the torch class), or a factory's that hosts have installed
            and registered with `@swarm.optimizer`.
        clip_norm: Clip each step's gradient to this 2-norm; None does not clip.
        schedule: What becomes of the learning rate after the warm-up: `constant`, or `linear` or `cosine` down to
            `min_lr_fraction` of it at `total_steps`. Steps are the expert's own, on whichever hosts they were made.
        warmup_steps: Steps in which the learning rate rises linearly from zero.
        total_steps: Where a schedule that is not constant ends, warm-up included.
        min_lr_fraction: What is left of the learning rate then.
        accumulate_tokens: Make a step when gradients of so many tokens have been collected, with the mean of the
            requests' gradients; None makes one for every batch, with their sum.
        arguments: Keyword arguments of the torch class or the factory, e.g. `lr=1e-3`. JSON values.

    Raises:
        ConfigError: The name is malformed or an argument cannot be used.
    """

    name: str
    clip_norm: float | None
    schedule: str
    warmup_steps: int
    total_steps: int | None
    min_lr_fraction: float
    accumulate_tokens: int | None
    arguments: Mapping[str, Any] = field(hash=False)

    def __init__(
        self,
        name: str = "adamw",
        *,
        clip_norm: float | None = None,
        schedule: str = "constant",
        warmup_steps: int = 0,
        total_steps: int | None = None,
        min_lr_fraction: float = 0.0,
        accumulate_tokens: int | None = None,
        **arguments: Any,
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            fix = f"Use one of {', '.join(OPTIMIZER_NAMES)}, or the name of a factory that hosts have installed."
            raise ConfigError(f"{name!r} cannot name an optimizer.", fix=fix)
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < float("inf")):
            raise ConfigError(f"clip_norm={clip_norm!r} is not a positive number.")
        if schedule not in SCHEDULES:
            raise ConfigError(f"There is no schedule {schedule!r}.", fix=f"Use one of {', '.join(SCHEDULES)}.")
        if type(warmup_steps) is not int or not 0 <= warmup_steps <= MAX_STEPS:
            raise ConfigError(f"warmup_steps={warmup_steps!r} is not a number of steps.")
        if total_steps is not None and (
            type(total_steps) is not int or not warmup_steps < total_steps <= MAX_STEPS or schedule == "constant"
        ):
            fix = "It belongs to the schedules 'linear' and 'cosine', and comes after the warm-up."
            raise ConfigError(f"total_steps={total_steps!r} cannot be used.", fix=fix)
        if total_steps is None and schedule != "constant":
            raise ConfigError(f"The schedule {schedule!r} has no end.", fix="Give total_steps.")
        if type(min_lr_fraction) not in (int, float) or not 0 <= min_lr_fraction <= 1:
            raise ConfigError(f"min_lr_fraction={min_lr_fraction!r} is not between 0 and 1.")
        if accumulate_tokens is not None and (
            type(accumulate_tokens) is not int or not 0 < accumulate_tokens <= MAX_STEPS
        ):
            raise ConfigError(f"accumulate_tokens={accumulate_tokens!r} is not a positive whole number.")
        values = {
            "name": name,
            "clip_norm": None if clip_norm is None else float(clip_norm),
            "schedule": schedule,
            "warmup_steps": warmup_steps,
            "total_steps": total_steps,
            "min_lr_fraction": float(min_lr_fraction),
            "accumulate_tokens": accumulate_tokens,
            "arguments": _as_json(arguments, f"The optimizer {name}"),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as they stand in a manifest."""
        return {key: getattr(self, key) for key in OPTIMIZER_SETTINGS} | {"arguments": dict(self.arguments)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> OptimizerSpec:
        """Read what `to_dict` wrote; settings that it lacks have their defaults. Raises `ConfigError`."""
        arguments = values.get("arguments", {})
        if (
            not isinstance(values.get("name"), str)
            or not isinstance(arguments, Mapping)
            or not all(isinstance(k, str) for k in arguments)
        ):
            raise ConfigError("An optimizer needs a name and a table of arguments.")
        if taken := sorted({"self", *OPTIMIZER_SETTINGS} & arguments.keys()):
            raise ConfigError(f"An optimizer's arguments may not be called {', '.join(map(repr, taken))}.")
        return cls(**{key: values[key] for key in OPTIMIZER_SETTINGS if key in values}, **arguments)


OPTIMIZER_SETTINGS = tuple(f.name for f in fields(OptimizerSpec) if f.name != "arguments")
"""What an `OptimizerSpec` holds besides the arguments of the torch class."""


@dataclass(frozen=True)
class ExpertGrid:
    """The experts of one mixture-of-experts layer: a name, an index space, and how to build each expert.

    Args:
        pattern: `ffn.[0:4].[0:4]` is the grid `ffn` with the 16 experts `ffn.0.0` to `ffn.3.3`; `head` a single one.
        module: A class registered with `@swarm.expert`, or its registered name.
        config: Keyword arguments of the class. JSON values.
        replicas: How many hosts hold each expert, if there are that many.
        optimizer: What the hosts train each expert with.

    Raises:
        ConfigError: The pattern, the config or the number of replicas cannot be used.
    """

    pattern: str
    module: str | type[nn.Module]
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    replicas: int = 2
    optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec("adamw", lr=1e-3))
    name: str = field(init=False)
    dims: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        name, *ranges = self.pattern.split(".")
        sizes = [_RANGE.fullmatch(r) for r in ranges]
        if not _NAME.fullmatch(name) or not all(sizes):
            raise ConfigError(f"{self.pattern!r} is not an expert pattern.", fix="Write it as 'ffn.[0:4].[0:4]'.")
        dims = tuple(int(m.group(1)) for m in sizes if m)
        count = 1
        for size in dims:
            count *= size
        if count > MAX_EXPERTS_PER_GRID:
            raise ConfigError(
                f"{self.pattern!r} has {count} experts.", fix=f"At most {MAX_EXPERTS_PER_GRID} are allowed."
            )
        if type(self.replicas) is not int or not 1 <= self.replicas <= 64:
            raise ConfigError(f"replicas={self.replicas!r} is not a whole number between 1 and 64.")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "module", self._module_name())
        object.__setattr__(self, "config", _as_json(self.config, f"The config of {self.pattern!r}"))

    def _module_name(self) -> str:
        if isinstance(self.module, str):
            if not _NAME.fullmatch(self.module):
                raise ConfigError(f"{self.module!r} cannot name an expert class.")
            return self.module
        for entry in registered.values():
            if entry.cls is self.module:
                return entry.name
        raise ConfigError(
            f"{self.module!r} is not registered.", fix="Decorate the class with @swarm.expert(name, ...)."
        )

    @property
    def module_name(self) -> str:
        """The registered name of the class."""
        assert isinstance(self.module, str)
        return self.module

    @property
    def size(self) -> int:
        """How many experts the grid has."""
        count = 1
        for size in self.dims:
            count *= size
        return count

    def uid(self, *coordinates: int) -> str:
        """The uid at these coordinates."""
        return ".".join([self.name, *map(str, coordinates)])

    def uids(self) -> list[str]:
        """Every uid, in row-major order."""
        return [self.uid(*c) for c in itertools.product(*map(range, self.dims))]

    def uid_at(self, index: int) -> str:
        """The uid at an index in row-major order."""
        coordinates: list[int] = []
        for size in reversed(self.dims):
            index, coordinate = divmod(index, size)
            coordinates.insert(0, coordinate)
        return self.uid(*coordinates)

    def __contains__(self, uid: str) -> bool:
        try:
            name, coordinates = parse_uid(uid)
        except MalformedFrameError:
            return False
        return (
            name == self.name
            and len(coordinates) == len(self.dims)
            and all(c < d for c, d in zip(coordinates, self.dims, strict=True))
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as they stand in a manifest."""
        return {
            "pattern": self.pattern,
            "module": self.module,
            "config": dict(self.config),
            "replicas": self.replicas,
            "optimizer": self.optimizer.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ExpertGrid:
        """Read what `to_dict` wrote. Raises `ConfigError`."""
        pattern, module, config = values.get("pattern"), values.get("module"), values.get("config", {})
        optimizer = values.get("optimizer")
        if not isinstance(pattern, str) or not isinstance(module, str) or not isinstance(config, Mapping):
            raise ConfigError("An expert grid needs a pattern, a module and a table as config.")
        if optimizer is not None and not isinstance(optimizer, Mapping):
            raise ConfigError(f"The optimizer of {pattern!r} is not a table.")
        spec = OptimizerSpec.from_dict(optimizer) if optimizer is not None else OptimizerSpec("adamw", lr=1e-3)
        return cls(pattern, module, config=config, replicas=values.get("replicas", 2), optimizer=spec)


def parse_uid(uid: str) -> tuple[str, tuple[int, ...]]:
    """Split `ffn.3.17` into `("ffn", (3, 17))`. Raises `MalformedFrameError`, since uids come from other peers."""
    match = _UID.fullmatch(uid) if isinstance(uid, str) and len(uid) <= MAX_UID_CHARS else None
    if match is None:
        raise MalformedFrameError(f"{str(uid)[:40]!r} is not an expert's uid.")
    return match.group(1), tuple(int(c) for c in match.group(2).split(".")[1:])
