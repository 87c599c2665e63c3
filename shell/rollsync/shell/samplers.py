"""Loads the staleness policy that a configuration names."""

from __future__ import annotations

import pkgutil

from rollsync.pure.config import MasterConfig
from rollsync.pure.rollout.sampler import CustomSampler, PromptGroupSampler
from rollsync.shell.config import ConfigError


def load_sampler(config: MasterConfig) -> PromptGroupSampler:
    """The configured policy: a built-in one is its own configuration, a user's is loaded by name.

    Raises:
        ConfigError: there is no such class, or it does not take the options.
    """
    named = config.sampler
    if not isinstance(named, CustomSampler):
        return named
    try:
        made: PromptGroupSampler = pkgutil.resolve_name(named.target)(**dict(named.options))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"sampler.target: {named.target} cannot be made: {error}",
            remedy="name an importable class as `module:ClassName`, with the options it takes",
            paths=("sampler.target",),
        ) from error
    return made
