"""What a host's memory is to the workers that share it, as real actors tell the synchronizer."""

from rollsync.pure.refit import MEBIBYTE
from rollsync.pure.refit.steps import Step
from rollsync.shell.refit.host_memory import worker_total_memory_bytes
from tests.shell.refit.scripted_workers import scripted_sync, scripted_workers


def test_buckets_are_a_share_of_what_all_workers_on_a_host_have_together(cluster: None) -> None:
    policy, engines = scripted_workers(2), scripted_workers(2, engines=True)
    whole = worker_total_memory_bytes(1)
    for worker in (*policy, *engines):
        worker.end.remote(Step.MEASURE, whole)
    sync = scripted_sync(policy, engines, timeout_s=60.0)
    sync.init_communicator()
    assert sync._bucket_size_bytes == whole // 4 // 4 // MEBIBYTE * MEBIBYTE
