"""The errors a call can raise: two concern its arguments, one concerns other ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence


def shown(value: object) -> str:
    """A value as error messages show it: the start of its repr if that is one line, else its type and shape."""
    try:
        text = repr(value)
    except Exception:  # a number of too many digits, or an object that cannot be shown
        text = ""
    if text and "\n" not in text:
        return text if len(text) <= 100 else f"{text[:60]}..."
    shape = getattr(value, "shape", None)
    return f"of type {type(value).__name__}" + (f" and shape {tuple(shape)}" if isinstance(shape, tuple) else "")


class InvalidInputError(ValueError):
    """An argument that no backend could accept: invalid by itself or together with the other arguments.

    Args:
        argument: The parameter's name as the caller wrote it.
        message: The value that the argument has and the values that it must have.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(argument, message)  # the arguments from which pickle and copy rebuild it
        self.argument = argument
        self.message = message

    def __str__(self) -> str:
        return f"{self.argument}: {self.message}"

    def renamed(self, names: Mapping[str, str]) -> InvalidInputError:
        """The same error for a caller with other parameter names, given as old name -> new name."""
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        message = words.sub(lambda found: names[found[0]], self.message)
        return InvalidInputError(names.get(self.argument, self.argument), message)


class UnsupportedError(NotImplementedError):
    """A valid call that no allowed backend can run.

    Args:
        what: The call in one phrase, or the feature that is refused.
        reasons: For every backend considered, the reasons why it cannot run the call.
    """

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]] | None = None) -> None:
        self.what = what
        self.reasons: dict[str, list[str]] = {name: list(why) for name, why in (reasons or {}).items()}
        super().__init__(what, self.reasons)

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items())])


class ExchangeError(RuntimeError):
    """Another rank did not take part in an exchange: it died, stalled, or was given another call.

    The process group cannot be used any more.

    Args:
        what: The exchange, such as "step 2 of the ring".
        peers: The ranks that were waited for, as ranks among all processes.
        reason: The process group's message.
    """

    def __init__(self, what: str, peers: Sequence[int], reason: str) -> None:
        super().__init__(what, peers, reason)
        self.what, self.peers, self.reason = what, tuple(peers), reason

    def __str__(self) -> str:
        shown_peers = ", ".join(map(str, self.peers[:8])) + (", ..." if len(self.peers) > 8 else "")
        return f"{self.what}, with rank {shown_peers}: {self.reason}"
