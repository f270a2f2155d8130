"""The API server as a source: one reflector a resource."""

import asyncio
from collections.abc import Mapping, Sequence

from rulecast_server.kube.client import ApiClient
from rulecast_server.kube.listwatch import WatchSettings
from rulecast_server.kube.reflector import Reflector
from rulecast_server.kube.selectors import RESOURCES, Resource
from rulecast_server.kube.status import Gate, Outlet, ResourceStatus, Sink

_RETRY_REFUSED = 5.0


class ClusterSource:
    """Watches an API server. Implements Source."""

    def __init__(
        self,
        client: ApiClient,
        *,
        settings: WatchSettings | None = None,
        resources: Sequence[Resource] = RESOURCES,
        retry_refused: float = _RETRY_REFUSED,
    ) -> None:
        self._client = client
        self._settings = settings or WatchSettings()
        self._resources = resources
        self._retry_refused = retry_refused
        self._outlet: Outlet | None = None
        self._status = {
            each.plural: ResourceStatus(resource=each.plural, required=each.required) for each in resources
        }

    @property
    def status(self) -> Mapping[str, ResourceStatus]:
        """By the plural of the resource."""
        return self._status

    @property
    def failures(self) -> int:
        """Exceptions from the sink."""
        return self._outlet.failures if self._outlet else 0

    def problems(self) -> list[str]:
        """What is wrong now."""
        lines = [line for status in self._status.values() for line in status.problems()]
        if self._client.config_error:
            lines.append(f"credentials: {self._client.config_error}")
        if self._outlet:
            lines += self._outlet.problems()
        return lines

    async def run(self, sink: Sink) -> None:
        """Deliver until cancelled."""
        outlet = self._outlet = Outlet(sink)
        gate = Gate([each.plural for each in self._resources if each.required], sink.synced)
        async with asyncio.TaskGroup() as tasks:
            for each in self._resources:
                reflector = Reflector(
                    resource=each,
                    client=self._client,
                    outlet=outlet,
                    gate=gate,
                    settings=self._settings,
                    status=self._status[each.plural],
                )
                tasks.create_task(reflector.run(), name=f"reflector {each.plural}")
            while True:
                await asyncio.sleep(self._retry_refused)
                outlet.retry()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
