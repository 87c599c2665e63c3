"""One small Ray cluster for the tests with real actors."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples/file_engine'}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Of every actor: it finds the tests' modules, and leaves the processor to the others."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of this host, without a dashboard.

    Its processes inherit the environment. As a `runtime_env` it would keep the actors from the
    workers that Ray has started before they are asked for. And what Ray itself puts into the
    environment stays there: with the mode of its authentication taken away, the next cluster of
    this process would refuse its own driver.
    """
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    ray.shutdown()
