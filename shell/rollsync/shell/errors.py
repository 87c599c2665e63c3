"""The root of every exception that rollsync raises on purpose.

The shell turns an error value of pure or codecs into one exception class per family (snapshots,
refit, configuration, ...), each derived from `RollsyncError` and each keeping the value it was
made from. Rule kept here: a message says what is wrong, a remedy says what to do about it, and
both survive pickling, because most of these exceptions cross a Ray call.
"""

from typing import ClassVar, Self


class RollsyncError(Exception):
    """Something a caller can expect to go wrong; the command line prints it as a line or two.

    Args:
        message: what is wrong, naming the file, field, rank or setting.
        remedy: what the reader can do about it, as an instruction; empty when nothing helps.
    """

    exit_code: ClassVar[int] = 2
    """What a command ends with: 2, something that the user can put right."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # The default calls the class again with `args`, which breaks for a family whose
        # __init__ takes an error value instead of a message.
        return _rebuild, (type(self), self.args), self.__dict__

    @classmethod
    def _bare(cls, args: tuple[object, ...]) -> Self:
        # `cls.__new__` may be RuntimeError's, which refuses to make what is an OSError as well.
        layout = OSError if OSError in cls.__mro__ else Exception
        error: Self = layout.__new__(cls)
        error.args = args
        return error


def _rebuild(cls: type[RollsyncError], args: tuple[object, ...]) -> RollsyncError:
    return cls._bare(args)
