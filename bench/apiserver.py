"""The apiserver stand-in with a cluster, as a process: `python -m bench.apiserver SERVICES ENDPOINTS`."""

import asyncio
import sys

from tests.fakes.apiserver import FakeApiServer

from bench import objects


async def _serve(services: int, endpoints: int) -> None:
    api = FakeApiServer()
    api.put(*objects.cluster(services, endpoints))
    await api.start()
    print(api.url, flush=True)
    loop = asyncio.get_running_loop()
    # Commands come on stdin: "SERVICE SHIFT" replaces an endpoint of a service.
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        number, shift = map(int, text.split())
        api.put(objects.endpoint_slice(number, endpoints, shift=shift))
    await api.stop()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
