"""How the API server says no: Status objects as real ones word them."""

from tests.fakes.apiserver_state import Object


class Refusal(Exception):
    """Answer with a Status."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        retry_after: int | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after
        details: Object = {}
        if retry_after is not None:
            details["retryAfterSeconds"] = retry_after
        if cause is not None:
            details["causes"] = [{"reason": cause, "message": message}]
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "details": details,
            "code": code,
        }


def gone(message: str = "The provided resource version is too old") -> Refusal:
    """410, as for a compacted version."""
    return Refusal(410, "Expired", message)


def too_large(asked: int, current: int) -> Refusal:
    """504, as from a cache that has not reached the version in three seconds."""
    message = f"Too large resource version: {asked}, current: {current}"
    return Refusal(504, "Timeout", message, retry_after=1, cause="ResourceVersionTooLarge")


def too_many(seconds: int = 1) -> Refusal:
    """429, as from priority and fairness."""
    return Refusal(429, "TooManyRequests", "Too many requests, please try again later.", retry_after=seconds)
