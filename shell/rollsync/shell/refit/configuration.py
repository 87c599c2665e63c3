"""Whether a checkpoint-engine configuration that code gives has the shape that a file's must have.

Rule kept here: nothing that was given is passed over in silence. What a backend's own options have
to be is for the backend to say, where it is made: its packages need not be on the driver's machine.
Only `refit_timeout_s` is also what whoever drives the workers waits by.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from rollsync.pure.refit.bucket_size import RATIO_SETTING, parse_ratio
from rollsync.pure.refit.patience import refit_timeout
from rollsync.shell.refit.errors import RefitConfigurationError, accepted

logger = logging.getLogger(__name__)

_KEYS = ("backend", RATIO_SETTING, "engine_kwargs")
_ALWAYS_NEEDED = ("backend", "engine_kwargs")
"""The share of the memory is not, where the bucket's size is known."""


def check_configuration(config: Mapping[str, object], *, needs_ratio: bool = True) -> None:
    """Refuse what would be no configuration in a file either, options apart.

    Args:
        config: what was given.
        needs_ratio: whether the size of a bucket is to be found by the share of the memory.

    Raises:
        RefitConfigurationError: a key is missing or unknown, or its value of another kind, or no
            number of the kind that is wanted.
    """
    for key in config:
        if key not in _KEYS:
            raise RefitConfigurationError(
                f"the checkpoint-engine configuration has {key!r}, which is none of its keys",
                remedy=f"it has {', '.join(_KEYS)}; a backend's option goes into"
                " engine_kwargs, under the backend's name",
            )
    for key in _ALWAYS_NEEDED:
        if key not in config:
            raise RefitConfigurationError(
                f"the checkpoint-engine configuration lacks {key!r}",
                remedy=f"give {', '.join(_KEYS)}",
            )
    backend = config["backend"]
    if not isinstance(backend, str) or not backend:
        raise RefitConfigurationError(
            f"backend is {backend!r}, and no name",
            remedy="name a built-in engine (`shm`, `nixl`, `auto`), or `module:ClassName`",
        )
    engine_kwargs = config["engine_kwargs"]
    if not isinstance(engine_kwargs, Mapping):
        raise RefitConfigurationError(
            f"engine_kwargs is {engine_kwargs!r}, and no mapping",
            remedy="give the options of each backend under its name, or {}",
        )
    for name, options in engine_kwargs.items():
        if not isinstance(options, Mapping):
            raise RefitConfigurationError(
                f"engine_kwargs.{name} is {options!r}, and not the options of a backend",
                remedy="put options under the backend's name, as in"
                f" {{{backend!r}: {{{name!r}: {options!r}}}}}",
            )
        accepted(refit_timeout(options))
    if needs_ratio:
        accepted(parse_ratio(config.get(RATIO_SETTING)))


def note_unread(backend: str, engine_kwargs: Mapping[str, Mapping[str, object]]) -> None:
    """Say which options the chosen backend will not read, as they are another's."""
    for name, options in engine_kwargs.items():
        if name != backend and options:
            logger.warning(
                "engine_kwargs.%s is not read, as the checkpoint engine is %r", name, backend
            )
