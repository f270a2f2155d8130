"""Waiting for what another task or thread brings about."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], *, within: float = 20.0) -> None:
    """Return once the condition holds; fail when it does not in time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not condition():
        assert loop.time() < end, "it did not come about"
        await asyncio.sleep(0.005)
