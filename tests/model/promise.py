"""The promise, as an oracle over the world's physical facts.

It shares no code with `account` or `plan_resume`: it looks at where prompts are with its own eyes,
and compares what the state says was trained with what the weights were really made of.
"""

from __future__ import annotations

from collections import Counter

from rollsync.pure.rollout import (
    Dropped,
    DropReason,
    InOrderSampler,
    ReadyFirstSampler,
    ReservedGroups,
    Trained,
    check_invariants,
)
from tests.model.world import Config, Node, is_over


def broken_promise(config: Config, node: Node) -> str | None:
    """What is wrong at this moment, in a sentence; None if nothing is."""
    for check in (_places, _weights, _rows, _generations, _capacity, _reasons, _batches):
        wrong = check(config, node)
        if wrong is not None:
            return wrong
    violations = check_invariants(node.state)
    if violations:
        first = violations[0]
        return f"rule {first.rule} is broken: {first.subject} {first.detail}"
    return None


def broken_end(config: Config, node: Node) -> str | None:
    """What is wrong when nothing happens by itself any more."""
    if not is_over(config, node):
        select = config.sampler.select(node.state, config.limits(node.state, node.served))
        admit = config.sampler.admit(node.state, config.limits(node.state, node.served))
        return f"deadlock: the trainer's answer is {select}, the generation's {admit}"
    for index in range(config.prompts):
        if f"p{index}" not in node.state.outcomes:
            return f"the run is over, and p{index} is neither trained nor dropped"
    if isinstance(config.sampler, InOrderSampler) and node.faults == 0:
        trained = [prompt for step in node.weights for prompt in step]
        if sorted(trained) != sorted(f"p{index}" for index in range(config.prompts)):
            return f"in-order training without a fault dropped something: {trained}"
    return None


def _places(config: Config, node: Node) -> str | None:
    """Every handed-out prompt has exactly one place, and no other prompt has any."""
    state = node.state
    found: Counter[str] = Counter()
    found.update(record.prompt.prompt_id for record in state.ledger.groups.values())
    found.update(group.prompt.prompt_id for group in state.replay.values())
    found.update(prompt.prompt_id for prompt in state.runtime.replacement_reserve)
    found.update(state.outcomes.keys())
    handed_out = config.handed_out(state)
    for index in range(handed_out):
        if found[f"p{index}"] == 0:
            return f"p{index} was handed out and is nowhere: it is lost"
    for prompt_id, count in found.items():
        if count > 1:
            return f"{prompt_id} is in {count} places"
        if int(prompt_id[1:]) >= handed_out:
            return f"{prompt_id} has a place, and the dataloader will hand it out again"
    return None


def _weights(config: Config, node: Node) -> str | None:
    """The weights were made of exactly what the state says was trained, each prompt once."""
    made_of = Counter(prompt for step in node.weights for prompt in step)
    for prompt_id, times in made_of.items():
        if times > 1:
            return f"{prompt_id} was trained {times} times"
    step = node.state.open_step
    committing = step is not None and step.optimizer_commit_open
    steps = len(node.weights) - (1 if committing else 0)
    if steps != node.state.progress.train_steps:
        return f"the state counts {node.state.progress.train_steps} steps, the weights had {steps}"
    settled = {prompt for each in node.weights[:steps] for prompt in each}
    trained = {name for name, how in node.state.outcomes.items() if isinstance(how, Trained)}
    if settled != trained:
        return f"trained by the state: {sorted(trained)}, by the weights: {sorted(settled)}"
    return None


def _rows(config: Config, node: Node) -> str | None:
    """Every row that a group needs is there."""
    state = node.state
    needed = [row for group in state.replay.values() for row in group.sample_ids]
    for record in state.ledger.groups.values():
        for sibling in record.siblings:
            for attempt in sibling.attempts:
                needed.extend(attempt.staged_keys)
    for row in needed:
        if row not in node.rows:
            return f"row {row} is owned and not there"
    return None


def _generations(config: Config, node: Node) -> str | None:
    """What the ledger takes for running is running."""
    believed = frozenset(
        (record.group_id, sibling.index, attempt.index)
        for record in node.state.ledger.groups.values()
        for sibling in record.siblings
        for attempt in sibling.attempts
        if attempt.status == "dispatched"
    )
    for group_id, sibling, attempt in sorted(believed - node.running):
        return f"{group_id}/{sibling} attempt {attempt} is waited for, and nobody generates it"
    for group_id, sibling, attempt in sorted(node.running - believed):
        return f"{group_id}/{sibling} attempt {attempt} is generated, and nobody waits for it"
    return None


def _capacity(config: Config, node: Node) -> str | None:
    """Admitted and untrained groups fit the buffer."""
    admitted = sum(record.admission_id is not None for record in node.state.ledger.groups.values())
    untrained = admitted + len(node.state.replay)
    if untrained > config.capacity:
        return f"{untrained} groups are admitted, the buffer holds {config.capacity}"
    return None


def _reasons(config: Config, node: Node) -> str | None:
    """Nothing is stale under a policy that trains every batch, whatever the timing."""
    if not isinstance(config.sampler, InOrderSampler | ReadyFirstSampler):
        return None
    for prompt_id, how in node.state.outcomes.items():
        if isinstance(how, Dropped) and how.reason is DropReason.STALE:
            return f"{prompt_id} was dropped as stale under {type(config.sampler).__name__}"
    return None


def _batches(config: Config, node: Node) -> str | None:
    """In order, without faults and spares, each step is the dataset's next batch in every run."""
    readmitted = all(reserved is ReservedGroups.READMIT for _, reserved in config.resumes)
    timeless = readmitted and config.spares == 0 and config.faults == 0
    if not timeless or not isinstance(config.sampler, InOrderSampler):
        return None
    for step, trained in enumerate(node.weights):
        first = step * config.batch
        due = range(first, min(first + config.batch, config.prompts))
        expected = tuple(sorted(f"p{index}" for index in due))
        if trained != expected:
            return f"step {step + 1} trained {trained}, the dataset's batch is {expected}"
    return None
