"""What Ray 2.60 says of actors that are gone, and the line that is left of it."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, RayActorError

from rollsync.shell.actor_deaths import failed_to_start, reason_of_death

STARTING = """\
The actor died because of an error raised in its creation task, \x1b[36mray::A.__init__()\x1b[39m \
(pid=3545, ip=192.0.2.2, actor_id=ffb1, repr=<act.A object at 0x7ff7>)
           ^^^^^^^^^^^^
  File "act.py", line 4, in __init__
    raise ValueError("model not here\\nnor there")
    ^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: model not here
nor there"""
KILLED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: B
\tactor_id: 6335
\tpid: 3605
\tnamespace: bddc
\tip: 192.0.2.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file."""


class Said(RayActorError):
    """An actor's end in these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def __str__(self) -> str:
        return self._words


def test_what_its_own_code_raised_is_told() -> None:
    error = Said(STARTING)
    assert failed_to_start(error)
    assert reason_of_death(error) == "ValueError: model not here"


def test_a_death_is_told_with_its_process_and_node() -> None:
    error = Said(KILLED)
    assert not failed_to_start(error)
    assert reason_of_death(error) == "its worker process has died (pid 3605 on 192.0.2.2)"


def test_words_that_are_not_known_are_left_as_they_are() -> None:
    assert reason_of_death(Said("The node is gone.\nmore")) == "The node is gone"
    assert reason_of_death(Said("")) == "Said"
    assert reason_of_death(ActorDiedError())
