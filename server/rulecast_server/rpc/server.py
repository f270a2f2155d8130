"""The gRPC server: Rules, Nodes, health, reflection, channelz."""

import grpc
import msgspec
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rulecast.errors import UsageError
from rulecast.flags import HostPort
from rulecast_server.feed import Hub
from rulecast_server.rpc.authorize import AllowAll, Authorizer, CertificateNames
from rulecast_server.rpc.calls import Calls
from rulecast_server.rpc.counters import RefusalLog, RpcCounters
from rulecast_server.rpc.credentials import ReloadingCredentials, TlsFiles
from rulecast_server.rpc.guard import InspectionGuard
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.nodes import SERVICE_NAME as NODES_SERVICE_NAME
from rulecast_server.rpc.nodes import NodesService
from rulecast_server.rpc.service import SERVICE_NAME, RulesService

_SERVICES = (
    SERVICE_NAME,
    NODES_SERVICE_NAME,
    health.SERVICE_NAME,
    reflection.SERVICE_NAME,
    "grpc.channelz.v1.Channelz",
)


class RpcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how to serve. Seconds."""

    listen: HostPort
    tls: TlsFiles | None = None
    """None: plain text."""
    keepalive_time: float = 30.0
    """A connection that is quiet for so long is probed; of both sides, whichever is first."""
    keepalive_timeout: float = 10.0
    min_ping_interval: float = 10.0
    """Clients that probe more often are told to go away: below every agent's keepalive time."""
    max_connection_age: float | None = None
    """End connections of this age, give or take a tenth, so that agents spread over new replicas."""
    max_connection_age_grace: float = 5.0
    limits: Limits = Limits()


class RpcServer:
    """Serves one hub."""

    def __init__(self, hub: Hub, settings: RpcSettings, *, authorizer: Authorizer | None = None) -> None:
        """Raises UsageError when the TLS files cannot be used."""
        self.credentials = ReloadingCredentials(settings.tls) if settings.tls is not None else None
        if authorizer is None:
            authorizer = CertificateNames() if settings.tls is not None else AllowAll()
        self._hub = hub
        self._settings = settings
        limits = settings.limits
        self.counters = RpcCounters()
        refusals = RefusalLog(self.counters)
        self._calls = Calls(limits, self.counters)
        guard = InspectionGuard(authorizer, limits, refusals, self._calls)
        self._server = grpc.aio.server(interceptors=(guard,), options=_options(settings))
        self.service = RulesService(
            hub,
            authorizer,
            limits=limits,
            counters=self.counters,
            refusals=refusals,
            calls=self._calls,
        )
        self.port = settings.listen.port
        """The port that is really bound; differs from the asked one only when that was 0."""
        self._health = health.aio.HealthServicer()
        nodes = NodesService(hub, guard)
        self._server.add_generic_rpc_handlers((self.service.handler(), nodes.handler()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(_SERVICES, self._server)
        channelz.add_channelz_servicer(self._server)

    @property
    def greeting(self) -> int:
        """Watch streams whose node is not established yet."""
        return self._calls.greeting

    async def start(self) -> None:
        """Bind and serve; health says NOT_SERVING until `set_serving`.

        Raises UsageError when the address cannot be bound.
        """
        await self.set_serving(serving=False)
        address = str(self._settings.listen)
        try:
            if self.credentials is not None:
                self.port = self._server.add_secure_port(address, self.credentials.credentials)
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise UsageError(f"--listen {address}: in use, or not an address of this host") from None
        await self._server.start()
        self._calls.start(self.port)

    async def set_serving(self, *, serving: bool) -> None:
        """Tell health checkers whether agents should be sent here."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, grace: float = 2.0) -> None:
        """End all streams with a clear reason, then the server; agents resume elsewhere."""
        await self._health.enter_graceful_shutdown()
        self._hub.close("the server is shutting down")
        await self._server.stop(grace)
        await self._calls.stop()


def _options(settings: RpcSettings) -> list[tuple[str, int]]:
    def ms(seconds: float) -> int:
        return int(seconds * 1000)

    limits = settings.limits
    options = [
        ("grpc.keepalive_time_ms", ms(settings.keepalive_time)),
        ("grpc.keepalive_timeout_ms", ms(settings.keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", ms(settings.min_ping_interval)),
        ("grpc.http2.max_pings_without_data", 0),
        # While a ping of another purpose is on its way, no keepalive is sent, and that ping waits a minute.
        ("grpc.http2.ping_timeout_ms", ms(settings.keepalive_timeout)),
        # Each frame would be followed by a ping that measures the bandwidth.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_ping_strikes", limits.ping_strikes),
        ("grpc.max_receive_message_length", limits.request_bytes),
        ("grpc.max_metadata_size", limits.metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.metadata_bytes),
        ("grpc.max_concurrent_streams", limits.streams_per_connection),
        ("grpc.server_handshake_timeout_ms", ms(limits.handshake)),
        ("grpc.max_connection_idle_ms", ms(limits.idle_connection)),
        # Two servers on one port would share its connections in silence.
        ("grpc.so_reuseport", 0),
    ]
    if settings.max_connection_age is not None:
        options += [
            ("grpc.max_connection_age_ms", ms(settings.max_connection_age)),
            # Without it the streams of a connection that was told to go away stay for ever.
            ("grpc.max_connection_age_grace_ms", ms(settings.max_connection_age_grace)),
        ]
    return options
