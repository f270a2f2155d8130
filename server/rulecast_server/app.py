"""`rulecast server`: composition of source, projector, log, gRPC and HTTP."""

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Mapping, Sequence

import uvloop

from rulecast import log
from rulecast_server.feed import DeltaLog, Hub, HubSettings
from rulecast_server.kube.open import Opened, open_with_reviews
from rulecast_server.pipeline import Pipeline, changed_versions, versions
from rulecast_server.rpc.authorize import AllowAll, Authorizer, CertificateNames
from rulecast_server.rpc.credentials import TlsFiles
from rulecast_server.rpc.limits import Limits
from rulecast_server.rpc.metrics import RpcCollector
from rulecast_server.rpc.server import RpcServer, RpcSettings
from rulecast_server.rpc.token_authorizer import TokenAuthorizer
from rulecast_server.rpc.tokens import TokenIdentities, TokenSettings
from rulecast_server.settings import ServerSettings, parse
from rulecast_server.web.metrics import registry
from rulecast_server.web.routes import http_listener

_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Raises UsageError for bad input."""
    settings = parse(argv)
    log.configure(output=settings.log_format, level=settings.log_level)
    _allow_many_connections()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


def _allow_many_connections() -> None:
    """Each agent is a file; the soft limit that many systems set is 1,024, for programs that select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(settings: ServerSettings) -> int:
    opened = await open_with_reviews(settings.source)
    source = opened.source
    hub = Hub(DeltaLog(), HubSettings(mark_interval=settings.mark_interval), seen=lambda: versions(source))
    pipeline = Pipeline(
        publish=hub.publish,
        versions=lambda: versions(source),
        changed=lambda: changed_versions(source),
    )
    hub.refresh = pipeline.refresh
    tokens = _tokens(settings, opened)
    rpc = RpcServer(hub, _rpc_settings(settings), authorizer=_authorizer(settings, opened, tokens))
    metrics = registry(source=source, pipeline=pipeline, hub=hub)
    metrics.register(RpcCollector(rpc, tokens=tokens))

    def not_ready() -> list[str]:
        return [] if pipeline.ready else source.problems() or ["the first lists are not in yet"]

    def unwell() -> list[str]:
        reviews = [f"tokens cannot be reviewed: {tokens.problem}"] if tokens and tokens.problem else []
        files = [rpc.credentials.error] if rpc.credentials and rpc.credentials.error else []
        # Without the first lists, the source's problems are the reason for that too.
        return list(dict.fromkeys([*not_ready(), *source.problems(), *reviews, *files]))

    http = http_listener(
        listen=settings.http,
        live=list,
        ready=not_ready,
        healthy=unwell,
        registry=metrics,
    )
    stop = asyncio.Event()
    failure: list[str] = []

    def broken(_loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        # What nobody caught is a bug; going on would serve stale rules in silence.
        error = context.get("exception")
        _log.critical("%s", context["message"], exc_info=error if isinstance(error, Exception) else None)
        if error is not None:
            failure.append(str(error))
            stop.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(broken)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await http.start()
    # Agents may connect before the first lists are in, and wait; health says NOT_SERVING until then.
    started = False
    feeding = asyncio.create_task(source.run(_Sink(pipeline, rpc)), name="source")
    feeding.add_done_callback(lambda _task: stop.set())
    try:
        await rpc.start()
        started = True
        if settings.insecure:
            _log.warning(
                "--insecure: plain text on %s; anyone may ask for any node, report for it, and inspect",
                settings.listen,
            )
        _log.info("gRPC on port %d, HTTP on port %d", rpc.port, http.port)
        await stop.wait()
    finally:
        feeding.cancel()
        (ended,) = await asyncio.gather(feeding, return_exceptions=True)
        await source.close()
        if started:
            await rpc.stop()
        await http.stop()
    if isinstance(ended, Exception):
        _log.critical("the source ended: %s", ended, exc_info=ended)
        failure.append(str(ended))
    return 1 if failure else 0


class _Sink:
    """The pipeline, and what else must hear that the first state is there."""

    def __init__(self, pipeline: Pipeline, rpc: RpcServer) -> None:
        self._rpc = rpc
        self._pipeline = pipeline
        self._tasks: set[asyncio.Task[None]] = set()
        self.events = pipeline.events

    def synced(self) -> None:
        """See `Sink.synced`."""
        self._pipeline.synced()
        task = asyncio.create_task(self._rpc.set_serving(serving=True), name="health")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tls(settings: ServerSettings) -> TlsFiles | None:
    if settings.insecure:
        return None
    assert settings.tls_cert is not None
    assert settings.tls_key is not None
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.client_ca)


def _rpc_settings(settings: ServerSettings) -> RpcSettings:
    access, limits = settings.access, Limits()
    return RpcSettings(
        listen=settings.listen,
        tls=_tls(settings),
        max_connection_age=access.max_connection_age,
        limits=Limits(
            # Plain text is for machines on which one address plays many agents.
            greetings_per_host=limits.greetings if settings.insecure else limits.greetings_per_host,
            strangers_per_host=limits.streams if settings.insecure else limits.strangers_per_host,
            streams_per_node=access.streams_per_node,
            streams_per_connection=access.streams_per_connection,
            unread=access.unread,
        ),
    )


def _tokens(settings: ServerSettings, opened: Opened) -> TokenIdentities | None:
    access = settings.access
    if settings.insecure or access.agent_auth != "token":
        return None
    assert opened.reviews is not None
    return TokenIdentities(
        opened.reviews,
        TokenSettings(audience=access.audience, fresh=access.token_fresh, grace=access.token_grace),
    )


def _authorizer(settings: ServerSettings, opened: Opened, tokens: TokenIdentities | None) -> Authorizer:
    if settings.insecure:
        return AllowAll()
    if tokens is None:
        return CertificateNames(settings.access.inspect_groups)
    assert opened.reviews is not None
    return TokenAuthorizer(tokens, opened.reviews, accounts=settings.access.agent_accounts)
