"""A plain torch engine in a Ray actor: small, slow and exact, for hosts without vLLM and for tests.

Rule kept here: what a request answers depends on the prompt, the settings, the seed and the
weights, and on nothing that runs beside it; so requests run one after the other, the completions
of each as one batch.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollsync.pure.refit.lifecycle import EngineState, Updating
from rollsync.pure.refit.steps import UPDATE, Step
from rollsync.shell.refit.errors import RefitConfigurationError
from rollsync.shell.refit.generation import (
    Completion,
    EngineProbe,
    SamplingSettings,
    ServingGate,
    probe_of,
)
from rollsync.shell.refit.host_memory import worker_total_memory_bytes
from rollsync.shell.refit.refit_receiver import RefitReceiver
from rollsync.shell.refit.report import WorkerTransfer
from rollsync.shell.refit.torch_update import TorchModelUpdate
from rollsync.shell.refit.weights import declared_specs


class TorchGenerationWorker:
    """One engine of one rank, made for `ray.remote`; see `GenerationEngine`.

    Args:
        model: path of a causal language model in Hugging Face's layout.
        workers_on_host: how many workers share this host's memory, if more than are in the groups
            that are synchronized.
        threads: how many threads torch computes with; 0 leaves its own number.
    """

    def __init__(self, model: str, *, workers_on_host: int = 1, threads: int = 0) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model).eval()
        self._workers_on_host = workers_on_host
        self._gate = ServingGate()
        self._turn = asyncio.Lock()
        self._receiver = RefitReceiver(
            local_rank=0,
            engine_world_size=1,
            make_update=lambda recorder: TorchModelUpdate(self._model, recorder),
            model=lambda: self._model,
        )

    async def start(self) -> EngineProbe:
        """Answers when the model is loaded."""
        return await self.probe()

    async def probe(self) -> EngineProbe:
        """Answers at once, whatever else runs."""
        return probe_of(self._gate.state)

    async def prepare_refit_info(self, refit_info: object) -> None:
        """Takes what the policy will send, if the policy says so."""
        self._receiver.declare(declared_specs(refit_info))

    async def checkpoint_engine_rpc_async(
        self, checkpoint_method: str, method_args: tuple[object, ...] = ()
    ) -> object:
        """Runs one step of the checkpoint engine's life cycle.

        Raises:
            RefitConfigurationError: when there is no such step.
        """
        steps: dict[str, Callable[..., object]] = {
            Step.MEASURE: self._total_memory_bytes,
            Step.MAKE: self._make,
            Step.PREPARE: self._receiver.prepare,
            Step.CONNECT: self._receiver.init_process_group,
            Step.FINALIZE: self._receiver.finalize,
        }
        try:
            if checkpoint_method == UPDATE:
                return await self._update()
            if checkpoint_method in steps:
                return await asyncio.to_thread(steps[checkpoint_method], *method_args)
        finally:
            # Beside an update, which may be stuck, another step can end: it has nothing to say.
            if not isinstance(self._gate.state, Updating):
                self._gate.state = self._receiver.state
        raise RefitConfigurationError(
            f"a generation worker has no step {checkpoint_method!r}",
            remedy=f"call one of {', '.join((*steps, UPDATE))}",
        )

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSettings,
        *,
        seed: int,
        weight_version: int | None = None,
    ) -> list[Completion]:
        """Samples completions; see `GenerationEngine`."""
        async with self._gate.request(weight_version) as version, self._turn:
            return await asyncio.to_thread(
                sample, self._model, prompt_token_ids, sampling, seed, version
            )

    async def weight_version(self) -> int | None:
        """The version that is served now, None when nothing may be generated."""
        return self._gate.weight_version

    async def refit_state(self) -> EngineState:
        """The engine's life-cycle state."""
        return self._gate.state

    async def _update(self) -> WorkerTransfer:
        async with self._gate.update():
            try:
                return await asyncio.to_thread(self._receiver.update)
            finally:
                self._gate.state = self._receiver.state

    def _make(self, backend: str, bucket_size_bytes: int, engine_kwargs: dict[str, object]) -> None:
        self._gate.hold_by(engine_kwargs)
        self._receiver.init(backend, bucket_size_bytes, engine_kwargs)

    def _total_memory_bytes(self) -> int:
        return worker_total_memory_bytes(self._workers_on_host)


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompt_token_ids: Sequence[int],
    sampling: SamplingSettings,
    seed: int,
    weight_version: int,
) -> list[Completion]:
    """Samples `sampling.n` completions of one prompt as one batch.

    Args:
        model: a causal language model.
        prompt_token_ids: at least one token.
        sampling: how to sample.
        seed: of the first completion; completion i is sampled with `seed + i`.
        weight_version: what the completions name as their version.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(sampling.n)]
    tokens: list[list[int]] = [[] for _ in generators]
    logprobs: list[list[float]] = [[] for _ in generators]
    stop = set(sampling.stop_token_ids)
    fed = torch.tensor([list(prompt_token_ids)] * sampling.n, device=model.device)
    cache = None
    for _ in range(sampling.max_new_tokens):
        answer = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        scores = log_probabilities(answer.logits[:, -1, :].float().cpu(), sampling)
        chosen = choose(scores, generators, greedy=sampling.temperature == 0)
        for i, token in enumerate(chosen.tolist()):
            if not tokens[i] or tokens[i][-1] not in stop:
                tokens[i].append(token)
                logprobs[i].append(scores[i, token].item())
        if all(sibling[-1] in stop for sibling in tokens):
            break
        fed = chosen[:, None].to(model.device)
    return [
        Completion(
            token_ids=tuple(token_ids),
            logprobs=tuple(token_logprobs),
            finish_reason="stop" if token_ids and token_ids[-1] in stop else "length",
            weight_version=weight_version,
        )
        for token_ids, token_logprobs in zip(tokens, logprobs, strict=True)
    ]


def log_probabilities(logits: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """The logarithms of the distributions that are sampled from; float32, the shape of `logits`.

    Args:
        logits: [completions, vocabulary], float32.
        sampling: temperature, top-k and top-p, applied in this order.
    """
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest_kept = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest_kept, float("-inf"))
    if sampling.top_p < 1:
        descending, order = logits.sort(dim=-1, descending=True)
        before = descending.softmax(-1).cumsum(-1) - descending.softmax(-1)
        drop = torch.zeros_like(before, dtype=torch.bool)
        drop.scatter_(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits.log_softmax(-1)


def choose(
    scores: torch.Tensor, generators: Sequence[torch.Generator], *, greedy: bool
) -> torch.Tensor:
    """The token of each completion: the likeliest, or one drawn with the completion's generator."""
    if greedy:
        return scores.argmax(-1)
    return torch.stack(
        [
            torch.multinomial(row.exp(), 1, generator=generator)[0]
            for row, generator in zip(scores, generators, strict=True)
        ]
    )
