"""Ties a run's trainer and engines to what the controller asks of them."""

from __future__ import annotations

from rollsync.pure.config import MasterConfig
from rollsync.shell.grpo.client import GrpoTrainerClient
from rollsync.shell.journal import EngineChanged, Journal, SyncRetried
from rollsync.shell.refit.generation import SamplingSettings
from rollsync.shell.refit.worker_group import GenerationGroup, PolicyGroup
from rollsync.shell.rollout.clients import GeneratedCompletion, GenerationRequest, Verifier
from rollsync.shell.rollout.controller import RunClients
from rollsync.shell.run.fleet import EngineFleet, EngineNotice
from rollsync.shell.run.fleet_requests import EngineRequests
from rollsync.shell.run.fleet_sync import FleetSync
from rollsync.shell.run.synchronizer import make_synchronizer
from rollsync.shell.run.tokenizer import PolicyTokenizer


class EngineClient:
    """The engines, as the rollout pump asks them.

    Args:
        fleet: the engines.
        end_token_id: the token that ends a completion.
    """

    def __init__(self, fleet: EngineFleet, *, end_token_id: int) -> None:
        self._requests = EngineRequests(fleet)
        self._end_token_id = end_token_id

    async def generate(self, request: GenerationRequest) -> GeneratedCompletion:
        """See `rollsync.shell.rollout.clients.GenerationClient`."""
        sampling = SamplingSettings(
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            stop_token_ids=(self._end_token_id,),
        )
        (completion,) = await self._requests.generate(
            request.prompt_token_ids, sampling, seed=request.seed
        )
        return GeneratedCompletion(
            token_ids=completion.token_ids,
            log_probabilities=completion.logprobs,
            finished=completion.finish_reason == "stop",
            weight_version=completion.weight_version,
        )


def make_clients(
    config: MasterConfig,
    *,
    trainer: GrpoTrainerClient,
    fleet: EngineFleet,
    tokenizer: PolicyTokenizer,
    verifier: Verifier,
    journal: Journal,
) -> tuple[FleetSync, RunClients]:
    """The sync between a trainer and its engines, and all that the controller works with. Nothing
    is connected yet: the first sync does that."""
    # All have started by then, and so each answers as soon as what another has done as well.
    timeout_s = config.cluster.collective_timeout_s
    group = GenerationGroup([], step_timeout_s=timeout_s)
    sync = FleetSync(
        fleet,
        group=group,
        synchronizer=make_synchronizer(
            config.checkpoint_engine,
            PolicyGroup(trainer.workers, step_timeout_s=timeout_s),
            group,
            step_timeout_s=timeout_s,
        ),
        trainer=trainer,
        retried=lambda version, why: journal.write(SyncRetried(weight_version=version, why=why)),
    )
    clients = RunClients(
        trainer=trainer,
        load_trainer=trainer.load,
        generation=EngineClient(fleet, end_token_id=tokenizer.end_token_id),
        sync=sync,
        codec=tokenizer,
        verifier=verifier,
        fleet=fleet,
    )
    return sync, clients


def noted(notice: EngineNotice) -> EngineChanged:
    """What the journal says of an engine that is good for something else than before."""
    return EngineChanged(
        engine=notice.engine,
        was=None if notice.was is None else notice.was.value,
        now=notice.now.value,
        why=notice.why,
        weight_version=notice.weight_version,
        pid=None if notice.probe is None else notice.probe.pid,
        host=None if notice.probe is None else notice.probe.host,
    )
