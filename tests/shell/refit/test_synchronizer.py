"""What the synchronizer asks of both sides, in which order, and what it makes of the answers."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import ray

from rollsync.shell.refit.errors import (
    RefitConfigurationError,
    RefitError,
    WeightTransferFailed,
)
from rollsync.shell.refit.interfaces import CheckpointEngineConfig, WeightSynchronizer
from rollsync.shell.refit.report import SyncReport, WorkerTransfer
from rollsync.shell.refit.synchronizer import SYNC_LABEL, CheckpointEngineWeightSynchronizer
from tests.shell.refit.recording import (
    MEBIBYTE,
    Log,
    RecordingGeneration,
    RecordingPolicy,
    RecordingTimer,
)

SET_UP = [
    ("policy", "checkpoint_engine_total_memory_bytes"),
    ("generation", "checkpoint_engine_total_memory_bytes"),
    ("policy", "init_checkpoint_engine"),
    ("generation", "init_checkpoint_engine"),
    ("policy", "prepare_checkpoint_engine"),
    ("generation", "prepare_checkpoint_engine"),
    ("policy", "init_checkpoint_engine_process_group"),
    ("generation", "init_checkpoint_engine_process_group"),
]
SECOND_SET_UP = SET_UP[2:]
SYNC = [
    ("policy", "send_weights_via_checkpoint_engine"),
    ("generation", "update_weights_from_checkpoint_engine"),
]
FINALIZE = [
    ("policy", "finalize_checkpoint_engine"),
    ("generation", "finalize_checkpoint_engine"),
]
REFIT_INFO = [("policy", "prepare_refit_info"), ("generation", "prepare_refit_info")]


@dataclass
class Bench:
    log: Log
    sync: CheckpointEngineWeightSynchronizer

    def since(self, before: int) -> list[tuple[str, str]]:
        return self.log.methods()[before:]


Make = Callable[..., Bench]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Two policy workers; two engines of two workers each, whose answers come out of order."""

    def bench(
        *,
        async_engine: bool = False,
        release_after_refit: bool = False,
        ratio: object = 0.25,
        workers: int = 4,
        dp_size: int = 2,
    ) -> Bench:
        log = Log()
        log.answers = {
            ("policy", "checkpoint_engine_total_memory_bytes"): [64 * MEBIBYTE, 60 * MEBIBYTE],
            ("generation", "checkpoint_engine_total_memory_bytes"): [
                [48 * MEBIBYTE + 7, 80 * MEBIBYTE],
                [50 * MEBIBYTE, 50 * MEBIBYTE],
            ],
            ("policy", "prepare_checkpoint_engine"): [{"rank": 1}, {"rank": 0}],
            ("generation", "prepare_checkpoint_engine"): [
                [{"rank": 1, "of": "g0"}, {"rank": 0, "of": "g0"}],
                [{"rank": 1, "of": "g1"}, {"rank": 0, "of": "g1"}],
            ],
            ("generation", "update_weights_from_checkpoint_engine"): [True, True],
        }
        config: CheckpointEngineConfig = {
            "backend": "shm",
            "update_weights_bucket_memory_ratio": ratio,  # type: ignore[typeddict-item]
            "engine_kwargs": {
                "shm": {"release_after_refit": release_after_refit, "option": 3},
                "nixl": {"device": "cpu"},
            },
        }
        monkeypatch.setattr(ray, "get", log.get)
        sync = CheckpointEngineWeightSynchronizer(
            RecordingPolicy(log, 2),
            RecordingGeneration(log, workers, dp_size, async_engine=async_engine),
            config,
        )
        return Bench(log, sync)

    return bench


def test_first_sync_connects_then_moves_the_weights(make: Make) -> None:
    bench = make()
    assert isinstance(bench.sync, WeightSynchronizer)
    before = bench.sync.is_stale
    bench.sync.init_communicator()
    connected = bench.sync.is_stale
    bench.sync.sync_weights()
    assert (before, connected, bench.sync.is_stale) == (True, True, False)
    bench.sync.mark_stale()
    assert bench.sync.is_stale
    assert bench.log.methods() == REFIT_INFO + SET_UP + SYNC
    assert bench.log.calls[1].arguments == {"weight": "info"}


def test_options_of_another_backend_are_told_of_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(release_after_refit=True)
    bench.sync.init_communicator()
    for _ in range(2):
        bench.sync.sync_weights()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["engine_kwargs.nixl is not read, as the checkpoint engine is 'shm'"]


def test_every_wait_has_the_policy_first(make: Make) -> None:
    bench = make()
    bench.sync.sync_weights()
    bench.sync.shutdown()
    for wait in bench.log.waits:
        sides = [who.split()[0] for who in wait]
        assert sides == ["policy"] * 2 + ["generation"] * 2
    assert [wait[0].split()[1] for wait in bench.log.waits] == [
        "checkpoint_engine_total_memory_bytes",
        "init_checkpoint_engine",
        "prepare_checkpoint_engine",
        "init_checkpoint_engine_process_group",
        "send_weights_via_checkpoint_engine",
        "finalize_checkpoint_engine",
    ]


def test_each_step_is_asked_for_with_the_arguments_of_the_contract(make: Make) -> None:
    bench = make()
    bench.sync.sync_weights(kv_scales={"layer.k_scale": 0.5})
    arguments = {(call.side, call.method): call.arguments for call in bench.log.calls}
    bucket = 12 * MEBIBYTE  # a quarter of the smallest worker's memory, in whole MiB
    options = {"release_after_refit": False, "option": 3}
    topology = [
        {"rank": 0},
        {"rank": 1},
        {"rank": 0, "of": "g0"},
        {"rank": 1, "of": "g0"},
        {"rank": 0, "of": "g1"},
        {"rank": 1, "of": "g1"},
    ]
    assert arguments["policy", "init_checkpoint_engine"] == {
        "backend": "shm",
        "bucket_size_bytes": bucket,
        "engine_kwargs": options,
    }
    assert arguments["generation", "init_checkpoint_engine"] == ("shm", bucket, options)
    assert arguments["policy", "prepare_checkpoint_engine"] == {}
    assert arguments["generation", "prepare_checkpoint_engine"] == ()
    assert arguments["policy", "init_checkpoint_engine_process_group"] == {
        "metadata": topology,
        "train_world_size": 2,
        "rollout_world_size": 4,
    }
    assert arguments["generation", "init_checkpoint_engine_process_group"] == [
        (0, 2, 4, topology),
        (2, 2, 4, topology),
    ]
    assert arguments["policy", "send_weights_via_checkpoint_engine"] == {
        "kv_scales": {"layer.k_scale": 0.5}
    }
    assert arguments["generation", "update_weights_from_checkpoint_engine"] == ()


@pytest.mark.parametrize(
    ("async_engine", "rpc"),
    [(False, "checkpoint_engine_rpc"), (True, "checkpoint_engine_rpc_async")],
)
def test_async_engines_are_asked_by_their_own_method(
    make: Make, async_engine: bool, rpc: str
) -> None:
    bench = make(async_engine=async_engine)
    bench.sync.sync_weights()
    bench.sync.shutdown()
    for call in bench.log.calls:
        assert call.rpc == ("checkpoint_engine_rpc" if call.side == "policy" else rpc)


def test_set_up_happens_once(make: Make) -> None:
    bench = make()
    bench.sync.init_communicator()
    bench.sync.sync_weights()
    before = len(bench.log.calls)
    bench.sync.init_communicator()
    bench.sync.sync_weights()
    bench.sync.sync_weights()
    assert bench.since(before) == REFIT_INFO + SYNC + SYNC


def test_after_a_shutdown_everything_but_the_memory_is_asked_again(make: Make) -> None:
    bench = make()
    bench.sync.init_communicator()
    bench.sync.shutdown()
    before = len(bench.log.calls)
    bench.sync.init_communicator()
    bench.sync.sync_weights()
    assert bench.since(before) == REFIT_INFO + SECOND_SET_UP + SYNC


def test_shutdown_without_a_set_up_and_a_second_shutdown_do_nothing(make: Make) -> None:
    bench = make()
    bench.sync.shutdown()
    assert bench.log.calls == []
    bench.sync.init_communicator()
    bench.sync.shutdown()
    before = len(bench.log.calls)
    assert bench.log.methods()[-2:] == FINALIZE
    bench.sync.shutdown()
    assert bench.since(before) == []


def test_release_after_refit_ends_every_sync_with_a_shutdown(make: Make) -> None:
    bench = make(release_after_refit=True)
    bench.sync.sync_weights()
    bench.sync.sync_weights()
    assert not bench.sync.is_stale
    assert bench.log.methods() == SET_UP + SYNC + FINALIZE + SECOND_SET_UP + SYNC + FINALIZE


@pytest.mark.parametrize("release_after_refit", [False, True])
@pytest.mark.parametrize("update", [[True, False], [0, None], [[], True]])
def test_an_engine_that_did_not_load_fails_the_sync(
    make: Make, release_after_refit: bool, update: list[object]
) -> None:
    bench = make(release_after_refit=release_after_refit)
    bench.sync.sync_weights()
    bench.log.answers["generation", "update_weights_from_checkpoint_engine"] = update
    before = len(bench.log.calls)
    with pytest.raises(WeightTransferFailed, match="shm") as raised:
        bench.sync.sync_weights()
    assert raised.value.backend == "shm"
    assert isinstance(raised.value, RuntimeError)
    assert bench.sync.is_stale
    again = SECOND_SET_UP if release_after_refit else []
    assert bench.since(before) == again + SYNC + (FINALIZE if release_after_refit else [])


@pytest.mark.parametrize("update", [[None, None], [True, None], [[True], {"loaded": 3}]])
def test_an_engine_without_an_opinion_does_not_fail_the_sync(
    make: Make, update: list[object]
) -> None:
    bench = make()
    bench.log.answers["generation", "update_weights_from_checkpoint_engine"] = update
    bench.sync.sync_weights()
    assert not bench.sync.is_stale


@pytest.mark.parametrize("side", ["policy", "generation"])
@pytest.mark.parametrize("release_after_refit", [False, True])
def test_a_worker_that_raises_fails_the_sync_and_the_next_one_works(
    make: Make, side: str, release_after_refit: bool
) -> None:
    bench = make(release_after_refit=release_after_refit)
    method = dict(SYNC)[side]
    good = bench.log.answers.get((side, method), [None, None])
    bench.log.answers[side, method] = [None, OSError("the link is down")]
    with pytest.raises(OSError, match="the link is down"):
        bench.sync.sync_weights()
    assert bench.sync.is_stale
    assert bench.log.methods() == SET_UP + SYNC + (FINALIZE if release_after_refit else [])
    bench.log.answers[side, method] = good
    bench.sync.sync_weights()
    assert not bench.sync.is_stale


def test_a_failing_release_does_not_hide_why_the_sync_failed(make: Make) -> None:
    bench = make(release_after_refit=True)
    bench.log.answers["generation", "update_weights_from_checkpoint_engine"] = [
        ValueError("bad weight"),
        True,
    ]
    bench.log.answers["policy", "finalize_checkpoint_engine"] = [OSError("gone"), None]
    with pytest.raises(ValueError, match="bad weight") as raised:
        bench.sync.sync_weights()
    assert any("gone" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("step", range(2, len(SET_UP)))
def test_a_failed_set_up_is_released_and_begun_again(make: Make, step: int) -> None:
    bench = make()
    side, method = SET_UP[step]
    good = bench.log.answers.get((side, method), [None, None])
    bench.log.answers[side, method] = [OSError("no memory left"), None]
    with pytest.raises(OSError, match="no memory left"):
        bench.sync.init_communicator()
    assert bench.log.methods()[-2:] == FINALIZE
    bench.log.answers[side, method] = good
    before = len(bench.log.calls)
    bench.sync.sync_weights()
    assert bench.since(before) == SECOND_SET_UP + SYNC


@pytest.mark.parametrize("ratio", ["a quarter", None, True, 0, 1, 1.5, -0.1, float("nan")])
def test_a_bad_ratio_is_refused_by_name_before_anything_remote(make: Make, ratio: object) -> None:
    bench = make(ratio=ratio)
    with pytest.raises(RefitConfigurationError, match="update_weights_bucket_memory_ratio"):
        bench.sync.sync_weights()
    with pytest.raises(RefitConfigurationError, match="update_weights_bucket_memory_ratio"):
        bench.sync.init_communicator()
    assert bench.log.calls == []
    assert bench.sync.is_stale


def test_less_than_a_mebibyte_is_refused(make: Make) -> None:
    bench = make(ratio=0.01)
    with pytest.raises(ValueError, match="MiB"):
        bench.sync.sync_weights()
    assert bench.log.methods() == SET_UP[:2]


@pytest.mark.parametrize(
    ("answers", "named"),
    [
        ([[{"rank": 0}, {"rank": 0}], [{"rank": 0}, {"rank": 1}]], "rank 0"),
        ([[{"rank": 0}, {"rank": 1}], [{"rank": 0}, {"rank": 2}]], "rank 1"),
        ([[{"rank": 0}, {"rank": 1}], [{"rank": 0}]], "group 1"),
        ([[{"rank": 0}], [{"rank": 0}]], "4"),
    ],
)
def test_engines_that_are_not_all_there_are_refused_and_not_waited_for(
    make: Make, answers: list[object], named: str
) -> None:
    bench = make()
    bench.log.answers["generation", "prepare_checkpoint_engine"] = answers
    with pytest.raises(RefitConfigurationError, match=named):
        bench.sync.sync_weights()
    assert bench.log.methods() == SET_UP[:6] + FINALIZE


def test_metadata_without_ranks_keeps_its_order(make: Make) -> None:
    bench = make(workers=2)
    bench.log.answers["policy", "prepare_checkpoint_engine"] = [["p0", "p1"]]
    bench.log.answers["generation", "prepare_checkpoint_engine"] = ["g0", ["g1"]]
    bench.sync.init_communicator()
    assert bench.log.calls[-1].arguments == [
        (0, 2, 2, ["p0", "p1", "g0", "g1"]),
        (1, 2, 2, ["p0", "p1", "g0", "g1"]),
    ]


def test_workers_that_engines_cannot_share_are_refused(make: Make) -> None:
    bench = make(workers=3)
    bench.log.answers["policy", "prepare_checkpoint_engine"] = ["p0"]
    bench.log.answers["generation", "prepare_checkpoint_engine"] = ["g0", "g1"]
    with pytest.raises(RefitConfigurationError, match="3 rollout workers"):
        bench.sync.init_communicator()


def test_the_transfer_and_nothing_else_is_timed(make: Make) -> None:
    bench = make(release_after_refit=True)
    bench.sync.sync_weights(timer=RecordingTimer(bench.log))
    sent, loaded = (method for _, method in SYNC)
    assert bench.log.timed == [f"{SYNC_LABEL}: {sent}, {loaded}"]


def test_a_sync_reports_its_figures(make: Make) -> None:
    bench = make()
    bench.log.answers["policy", "send_weights_via_checkpoint_engine"] = [
        WorkerTransfer("policy", rank, 7, 3, 30, 0, {"send": 0.25 * (rank + 1)}) for rank in (0, 1)
    ]
    bench.log.answers["generation", "update_weights_from_checkpoint_engine"] = [
        [
            WorkerTransfer("rollout", 2 * g + r, 7, 3, 30, 2, {"load": 0.5 * (g + r)}, 0, 4 + r)
            for r in (0, 1)
        ]
        for g in (0, 1)
    ]
    report = bench.sync.sync_weights()
    assert isinstance(report, SyncReport)
    assert (report.weight_version, report.tensors, report.payload_bytes) == (7, 3, 120)
    assert (report.buckets, report.batches, report.bucket_bytes) == (5, 2, 12 * MEBIBYTE)
    assert (report.backend, report.rollout_workers) == ("shm", 4)
    assert report.stage_s["send"] == 0.5
    assert report.stage_s["load"] == 1.0
    assert report.total_s >= report.stage_s["transfer"] > 0
    assert report.gigabytes_per_s == pytest.approx(120e-9 / report.stage_s["transfer"])
    assert "weight version 7 through shm: 3 tensors, 120 bytes in 5 buckets" in str(report)
    assert "in 5 buckets and 2 batches to 4 rollout workers, " in str(report)
    directly = msgspec.structs.replace(report, direct_bytes=(30, 0, 5, 0), buckets=None)
    assert ": 3 tensors, 120 bytes (35 of them read directly) in 2 batches" in str(directly)


def test_engines_that_only_say_that_it_went_well_leave_the_figures_to_the_policy(
    make: Make,
) -> None:
    bench = make()
    bench.log.answers["policy", "send_weights_via_checkpoint_engine"] = [
        WorkerTransfer("policy", rank, 7, 3, 30, 0, {"send": 0.25}) for rank in (0, 1)
    ]
    bench.log.answers["generation", "update_weights_from_checkpoint_engine"] = [True, True]
    report = bench.sync.sync_weights()
    assert (report.weight_version, report.tensors, report.payload_bytes) == (7, 3, 30)
    assert (report.rollout_workers, report.buckets, report.received_bytes) == (0, None, ())
    assert report.gigabytes_per_s > 0
    assert "3 tensors, 30 bytes sent to each engine, of which none tells what it" in str(report)


def test_a_sync_of_which_nobody_tells_the_figures_claims_none(make: Make) -> None:
    report = make().sync.sync_weights()
    assert (report.weight_version, report.payload_bytes) == (None, 0)
    told = str(report)
    assert "weight version unknown through shm: no worker tells what moved (set_up " in told
    assert "bytes" not in told
    assert "GB/s" not in told


def test_workers_at_different_versions_fail_the_sync(make: Make) -> None:
    bench = make()
    bench.log.answers["policy", "send_weights_via_checkpoint_engine"] = [
        WorkerTransfer("policy", rank, 7 + rank, 3, 30, 0, {"send": 0.25}) for rank in (0, 1)
    ]
    with pytest.raises(WeightTransferFailed, match="7, 8"):
        bench.sync.sync_weights()
    assert bench.sync.is_stale


def test_the_family_of_errors_is_caught_in_one_clause(make: Make) -> None:
    bench = make(ratio="much")
    with pytest.raises(RefitError):
        bench.sync.sync_weights()
