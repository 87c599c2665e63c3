"""Makes a checkpoint engine by name."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import get_args, get_type_hints

import msgspec

from rollsync.pure.config import CheckpointEngineConfig
from rollsync.pure.refit.patience import refit_timeout
from rollsync.shell.refit.engines.base import CheckpointEngine
from rollsync.shell.refit.engines.direct import check_relayed
from rollsync.shell.refit.errors import RefitConfigurationError, accepted

BUILT_IN: Mapping[str, str] = {
    "auto": "rollsync.shell.refit.engines.auto:AutoCheckpointEngine",
    "nixl": "rollsync.shell.refit.engines.nixl:NixlCheckpointEngine",
    "shm": "rollsync.shell.refit.engines.shm:ShmCheckpointEngine",
}
"""Loaded when asked for, so that no engine's packages are needed by another's users."""

_SCALARS = frozenset({str, int, float, bool})
"""What a configuration file can give as an option's value."""


def create_checkpoint_engine(
    backend: str, *, bucket_size_bytes: int, engine_kwargs: Mapping[str, object]
) -> CheckpointEngine:
    """An engine of a built-in name, or of the class `module:ClassName`.

    Raises:
        RefitConfigurationError: there is no such engine, or it does not take the options, or not
            with these values (of a built-in engine), or not together.
    """
    engine_class = _engine_class(backend)
    if backend in BUILT_IN:
        _check_values(backend, engine_class, engine_kwargs)
    try:
        engine = engine_class(bucket_size=bucket_size_bytes, **engine_kwargs)
    except TypeError as error:
        raise _refused(backend, error) from error
    return engine


def check_options(config: CheckpointEngineConfig) -> None:
    """Refuse what `create_checkpoint_engine` would refuse, or an engine could not work with,
    without making an engine.

    Raises:
        RefitConfigurationError: there is no such engine, or it does not take the options, or not
            with these values, or not together.
    """
    backend = config.backend
    options = config.engine_kwargs.get(backend, {})
    engine_class = _engine_class(backend)
    try:
        inspect.signature(engine_class).bind(bucket_size=0, **options)
    except TypeError as error:
        raise _refused(backend, error) from error
    _check_values(backend, engine_class, options)
    accepted(refit_timeout(options))
    if backend in BUILT_IN:
        check_relayed(direct=bool(options.get("direct")), relay=bool(options.get("relay")))


def _check_values(
    backend: str, engine_class: Callable[..., CheckpointEngine], options: Mapping[str, object]
) -> None:
    """Refuse a value of another kind than the engine declares for its option."""
    for name, value in options.items():
        wanted = _kind_of(engine_class, name)
        try:
            msgspec.convert(value, wanted)
        except msgspec.ValidationError as error:
            raise RefitConfigurationError(
                f"the option {name} of the checkpoint engine {backend!r} is {value!r}: {error}",
                remedy=f"correct checkpoint_engine.engine_kwargs.{backend}.{name}",
            ) from error


def _kind_of(engine_class: Callable[..., CheckpointEngine], option: str) -> object:
    """What a value of an option has to be; `object` where no kind of scalar is declared for it."""
    makes = engine_class.__init__ if inspect.isclass(engine_class) else engine_class
    try:
        declared = get_type_hints(makes).get(option, object)
    except (NameError, TypeError):  # Some names are there for type checkers only.
        return object
    return declared if {declared, *get_args(declared)} & _SCALARS else object


def _engine_class(backend: str) -> Callable[..., CheckpointEngine]:
    target = BUILT_IN.get(backend, backend)
    if ":" not in target:
        raise RefitConfigurationError(
            f"there is no checkpoint engine {backend!r}",
            remedy=f"use one of {', '.join(sorted(BUILT_IN))}, or `module:ClassName`",
        )
    try:
        engine_class: Callable[..., CheckpointEngine] = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise RefitConfigurationError(
            f"the checkpoint engine {backend!r} cannot be loaded: {error}",
            remedy="install its package, or correct the name `module:ClassName`",
        ) from error
    return engine_class


def _refused(backend: str, error: TypeError) -> RefitConfigurationError:
    return RefitConfigurationError(
        f"the checkpoint engine {backend!r} does not take these options: {error}",
        remedy=f"correct engine_kwargs: checkpoint_engine.engine_kwargs.{backend} of a run, or"
        " those of RollsyncTrainerInitInfo",
    )
