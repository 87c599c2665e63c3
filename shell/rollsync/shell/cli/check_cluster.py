"""`rollsync check-cluster CONFIG`: a refit with made-up weights, and what each route carries."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The configuration file, and the cluster to try."""
    parser.add_argument("config", type=Path, help="YAML file, as for `rollsync run`")
    parser.add_argument(
        "--address",
        help="Ray cluster to try, as host:port or auto: in place of cluster.address",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each route; then 0."""
    from rollsync.shell.cli._printing import say
    from rollsync.shell.cli._settings import read_settings

    config = read_settings(args)
    # Imported late: torch, Ray and transformers take seconds, and a wrong file should not.
    from rollsync.shell.run.check import check_cluster

    say(f"backend {config.checkpoint_engine.backend}, model {config.model.path}")
    for each in check_cluster(config, note=say):
        say(
            f"{each.route} by {each.carriers}: {each.payload_bytes / 1e6:.2f} MB "
            f"in {each.seconds * 1e3:.1f} ms, {each.gigabytes_per_s:.3f} GB/s"
        )
        sys.stdout.flush()
    return 0
