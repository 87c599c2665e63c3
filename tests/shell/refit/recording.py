"""A policy and a generation that answer like NeMo-RL's, and record what was asked of them."""

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MEBIBYTE = 1024 * 1024
RPC_AXES = ["tensor_parallel", "pipeline_parallel"]


@dataclass(frozen=True)
class Call:
    """One method run on one side's workers."""

    side: str
    rpc: str
    method: str
    arguments: object


@dataclass
class Log:
    """Everything that happened, in order, and what the workers answer."""

    calls: list[Call] = field(default_factory=list)
    waits: list[list[str]] = field(default_factory=list)
    timed: list[str] = field(default_factory=list)
    answers: dict[tuple[str, str], Sequence[object]] = field(default_factory=dict)

    def methods(self) -> list[tuple[str, str]]:
        return [(call.side, call.method) for call in self.calls]

    def get(self, refs: Sequence["Ref"]) -> list[object]:
        """Stands in for `ray.get`: records whom it waited for, and raises the first failure."""
        self.waits.append([f"{ref.side} {ref.method}" for ref in refs])
        for ref in refs:
            if isinstance(ref.answer, Exception):
                raise ref.answer
        return [ref.answer for ref in refs]


@dataclass(frozen=True)
class Ref:
    side: str
    method: str
    answer: object


class RecordingGroup:
    """A worker group; without an answer of its own, a method answers None on every worker run."""

    def __init__(self, log: Log, side: str, workers: int, leaders: int) -> None:
        self.workers = [object() for _ in range(workers)]
        self._log = log
        self._side = side
        self._leaders = leaders

    def run_all_workers_single_data(self, method_name: str, **kwargs: Any) -> list[Any]:
        axes = kwargs.pop("run_rank_0_only_axes", RPC_AXES)
        assert axes == RPC_AXES
        method = kwargs.pop("checkpoint_method")
        (arguments,) = kwargs.values()
        return self._answer(method_name, method, arguments)

    def run_all_workers_multiple_data(self, method_name: str, **kwargs: Any) -> list[Any]:
        axes = kwargs.pop("run_rank_0_only_axes")
        assert axes == RPC_AXES
        common = kwargs.pop("common_kwargs")
        assert set(common) == {"checkpoint_method"}
        return self._answer(method_name, common["checkpoint_method"], kwargs.pop("method_args"))

    def _answer(self, rpc: str, method: str, arguments: object) -> list[Any]:
        self._log.calls.append(Call(self._side, rpc, method, arguments))
        answers = self._log.answers.get((self._side, method), [None] * self._leaders)
        return [Ref(self._side, method, answer) for answer in answers]


class RecordingPolicy:
    def __init__(self, log: Log, workers: int) -> None:
        self.worker_group = RecordingGroup(log, "policy", workers, workers)
        self._log = log

    def prepare_refit_info(self) -> object:
        self._log.calls.append(Call("policy", "-", "prepare_refit_info", None))
        return {"weight": "info"}


class RecordingGeneration:
    def __init__(self, log: Log, workers: int, dp_size: int, *, async_engine: bool) -> None:
        self.worker_group = RecordingGroup(log, "generation", workers, dp_size)
        self.dp_size = dp_size
        self.cfg: Mapping[str, object] = {"vllm_cfg": {"async_engine": async_engine}}
        self._log = log

    def prepare_refit_info(self, refit_info: object) -> None:
        self._log.calls.append(Call("generation", "-", "prepare_refit_info", refit_info))


@dataclass
class RecordingTimer:
    log: Log

    def time(self, label: str) -> Any:
        return self._time(label)

    @contextmanager
    def _time(self, label: str) -> Any:
        before = len(self.log.calls)
        yield
        methods = [call.method for call in self.log.calls[before:]]
        self.log.timed.append(f"{label}: {', '.join(methods)}")
