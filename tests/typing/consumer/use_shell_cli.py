"""`rollsync.shell.cli` and `rollsync.shell.errors` in someone else's program."""

from typing import assert_type

from rollsync.shell.cli import main
from rollsync.shell.errors import RollsyncError

assert_type(main(["--help"]), int)
main([1])  # type: ignore[list-item]

try:
    main()
except RollsyncError as error:
    assert_type(error.message, str)
    assert_type(error.remedy, str)

RollsyncError("what is wrong", "what to do")  # type: ignore[call-arg]
