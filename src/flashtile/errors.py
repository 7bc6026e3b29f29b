"""The two errors a call can raise, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class InvalidInputError(ValueError):
    """An argument that no backend could accept: wrong by itself or against the other arguments.

    Args:
        argument: The parameter's name as the caller wrote it.
        message: What it is and what it must be.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(f"{argument}: {message}")
        self.argument = argument


class UnsupportedError(NotImplementedError):
    """A valid call that no allowed backend can run.

    Args:
        what: The call in one phrase, or the feature that is refused.
        reasons: For every backend that was asked, why it cannot.
    """

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]] | None = None) -> None:
        self.reasons: dict[str, list[str]] = {name: list(why) for name, why in (reasons or {}).items()}
        lines = [f"  {name}: {'; '.join(why)}" for name, why in self.reasons.items()]
        super().__init__("\n".join([what, *lines]))
