"""Whether a Ray actor is gone, and why, in one line from the many that Ray says.

Rule kept here: what an actor's own code raised is told in its words, and a death from outside with
the process and the node, where its log is.
"""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, RayActorError

_STARTING = "error raised in its creation task"
_WHERE = re.compile(r"^\s*(pid|ip): (\S+)$", re.MULTILINE)
_WHY = re.compile(r"^The actor is dead because (?P<why>.+?)\.(?: |$)", re.MULTILINE)


def is_death(error: BaseException) -> bool:
    """Whether an actor's process is gone for good, as far as Ray knows; an actor that it cannot
    reach now may come back."""
    return isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)


def failed_to_start(error: RayActorError) -> bool:
    """Whether its constructor raised something: it never was there."""
    return _STARTING in str(error)


def reason_of_death(error: RayActorError) -> str:
    """In a line."""
    text = str(error).strip()
    lines = text.splitlines()
    if not lines:
        return type(error).__name__
    if failed_to_start(error):
        # The exception stands behind the frames of its traceback, which are indented.
        frames = [number for number, line in enumerate(lines) if line.startswith(" ")]
        raised = lines[frames[-1] + 1 :] if frames else []
        return raised[0] if raised else lines[-1]
    found = _WHY.search(text)
    why = lines[0].rstrip(".") if found is None else found["why"]
    where = dict(_WHERE.findall(text))
    return f"{why} (pid {where['pid']} on {where['ip']})" if len(where) == 2 else why
