"""What a write or a read-back of one family came to."""

import msgspec

from rulecast.model import ServiceKey
from rulecast.view import ServiceView

DESCRIBED = 20
"""Lines of difference that are worded; the rest is only counted."""


class Findings(msgspec.Struct):
    """What a read-back found."""

    lines: list[str] = msgspec.field(default_factory=list)
    count: int = 0
    operations: int = 0
    errors: dict[ServiceKey, str] = msgspec.field(default_factory=dict)
    dropped: dict[ServiceKey, ServiceView] = msgspec.field(default_factory=dict)
    """Services with an error that had to be taken out of the state."""
    mended: bool = False
    usable: bool = False
    """nft was seen to take what is known to be right."""

    def add(self, line: str) -> None:
        """Count one difference and word it while there is room."""
        self.count += 1
        if len(self.lines) < DESCRIBED:
            self.lines.append(line)
