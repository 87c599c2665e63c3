"""The configuration of the commands that start workers, and what is to be said of it beforehand."""

from __future__ import annotations

import argparse
import sys

from rollsync.pure.config import MasterConfig, doubtful
from rollsync.shell.cli._printing import visible_line
from rollsync.shell.config import at_address, read_config


def read_settings(args: argparse.Namespace) -> MasterConfig:
    """The configuration that a command line names; doubts about it go to standard error.

    Args:
        args: with the file's path as `config`, and a cluster in its place as `address`.

    Raises:
        ConfigError: it cannot be used.
    """
    config = at_address(read_config(args.config), args.address)
    for each in doubtful(config):
        print(f"rollsync: note: {visible_line(f'{each.path}: {each.reason}')}", file=sys.stderr)
    return config
