"""The agent: composition of feed, reconciler, dataplane, health and connection tracking."""

import asyncio
import gc
import logging
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence

from rulecast import log
from rulecast.errors import UsageError
from rulecast.model import Family, ServiceKey
from rulecast.view import ServiceView
from rulecast_agent.dataplane.base import Dataplane, DataplaneError
from rulecast_agent.dataplane.iptables import family as iptables_family
from rulecast_agent.dataplane.iptables.dataplane import IptablesDataplane
from rulecast_agent.dataplane.ipvs import dataplane as ipvs_dataplane
from rulecast_agent.dataplane.ipvs.dataplane import IpvsDataplane
from rulecast_agent.dataplane.nftables.dataplane import NftablesDataplane
from rulecast_agent.feed.base import Feed
from rulecast_agent.feed.channels import ChannelSettings, ClientTls, check_tls
from rulecast_agent.feed.checkpoint import CheckpointFile
from rulecast_agent.feed.client import ClientSettings, GrpcFeed
from rulecast_agent.feed.discovery import AddressFile, Discovery
from rulecast_agent.feed.persistent import PersistentFeed
from rulecast_agent.feed.session import AgentIdentity, AgentSession
from rulecast_agent.feed.slices import ApiServers, SliceLookup
from rulecast_agent.feed.tokens import TokenFile
from rulecast_agent.health.listeners import ServiceHealthServers
from rulecast_agent.health.server import HealthServer
from rulecast_agent.kernel import lock, sysctl
from rulecast_agent.kernel.addresses import InterfaceAddresses, list_addresses, supported_families
from rulecast_agent.kernel.conntrack import ConntrackCleaner
from rulecast_agent.kernel.iptables import Backend
from rulecast_agent.kernel.ipvs import FALLBACK, HASH_PORT, Scheduling, Timeouts
from rulecast_agent.metrics import AgentMetrics
from rulecast_agent.reconcile import Reconciler
from rulecast_agent.settings import AgentSettings
from rulecast_agent.status import ProxyHealth
from rulecast_agent.succession import Succession

_log = logging.getLogger(__name__)

Job = Callable[[], Coroutine[None, None, None]]
"""Something that runs as long as the agent does."""


def agent_session(settings: AgentSettings, *, version: str) -> AgentSession:
    """The protocol state of this agent, whatever carries it."""
    return AgentSession(AgentIdentity(node_name=settings.node_name, version=version, mode=settings.mode))


def remote_feed(settings: AgentSettings, *, version: str) -> Feed:
    """The feed from the servers that the flags name. Raises UsageError for TLS files that cannot be used."""
    tls = settings.tls
    files = ClientTls(server_ca=tls.ca, cert=tls.cert, key=tls.key) if tls else None
    token = TokenFile(tls.token) if tls and tls.token else None
    if files is not None:
        check_tls(files)
    if token is not None:
        token.check()
    session = agent_session(settings, version=version)
    feed = GrpcFeed(
        session,
        ClientSettings(
            servers=[str(server) for server in settings.servers],
            discovery=discovery_of(settings),
            channel=ChannelSettings(tls=files, server_name=tls.server_name if tls else ""),
            token=token,
        ),
    )
    return kept_on_disk(settings, feed, session)


def discovery_of(settings: AgentSettings) -> Discovery | None:
    """How the servers are found, when the flags do not name them."""
    chosen = settings.discovery
    if chosen is None:
        return None
    api = ApiServers(chosen.apiservers, chosen.credentials)
    service = f"{chosen.namespace}/{chosen.service}"
    return Discovery(
        SliceLookup(api, chosen.namespace, chosen.service),
        AddressFile(settings.state_dir, service) if settings.state_dir is not None else None,
    )


def kept_on_disk(settings: AgentSettings, feed: Feed, session: AgentSession) -> Feed:
    """The feed, with the last good state in --state-dir when there is one."""
    if settings.state_dir is None:
        return feed
    return PersistentFeed(feed, session, CheckpointFile(settings.state_dir, settings.node_name))


def dataplane_of(settings: AgentSettings) -> tuple[Dataplane, Sequence[Callable[[], bool]]]:
    """The mechanism of a mode, and what removes the rules of the others.

    Raises UsageError when this machine or this version lacks it.
    """
    nftables, iptables, ipvs = NftablesDataplane(), _iptables(settings), _ipvs(settings)
    modes: dict[str, tuple[Dataplane, Sequence[Callable[[], bool]]]] = {
        "nftables": (nftables, [iptables.cleanup, ipvs.cleanup]),
        "iptables": (iptables, [nftables.cleanup, iptables.leftovers, ipvs.cleanup]),
        "ipvs": (ipvs, [nftables.cleanup, iptables.cleanup]),
    }
    dataplane, others = modes[settings.mode]
    try:
        dataplane.probe()
    except DataplaneError as error:
        raise UsageError(f"--mode {settings.mode}: {error}") from None
    return dataplane, others


def _iptables(settings: AgentSettings) -> IptablesDataplane:
    chosen = settings.iptables
    localhost = chosen.localhost_nodeports
    options = iptables_family.Options(
        localhost_node_ports=localhost,
        tcp_be_liberal=sysctl.tcp_be_liberal,
        # After the rules, which hold the guard against neighbors.
        started=sysctl.allow_route_localnet if localhost else _nothing,
    )
    return IptablesDataplane(
        backend=None if chosen.backend == "auto" else Backend(chosen.backend), options=options
    )


def _ipvs(settings: AgentSettings) -> IpvsDataplane:
    chosen = settings.ipvs
    timeouts = Timeouts(int(chosen.tcp_timeout), int(chosen.tcp_fin_timeout), int(chosen.udp_timeout))
    # As kube-proxy: with mh, ports count, and a server without weight is not chosen.
    flags = FALLBACK | HASH_PORT if chosen.scheduler == "mh" else 0
    return IpvsDataplane(
        options=ipvs_dataplane.Options(
            scheduling=Scheduling(chosen.scheduler, 0, flags),
            timeouts=timeouts,
            strict_arp=chosen.strict_arp,
            route_mark=1 << chosen.mark_bit,
            exclude_cidrs=chosen.exclude_cidrs,
            local_addresses=list_addresses,
        )
    )


def _nothing() -> None:
    pass


async def serve(settings: AgentSettings, feed: Feed, *, beside: Sequence[Job] = ()) -> int:
    """Run until SIGTERM or SIGINT; rules stay in place. `beside` runs as long (a source, when standalone).

    Raises UsageError for what cannot work at all.
    """
    log.configure(output=settings.log_format, level=settings.log_level)
    held = lock.acquire()
    try:
        return await _serve(settings, feed, beside)
    finally:
        held.close()


async def _serve(settings: AgentSettings, feed: Feed, beside: Sequence[Job]) -> int:
    dataplane, others = dataplane_of(settings)
    succession = Succession(others)
    for warning in settings.warnings:
        _log.warning("%s", warning)
    if settings.mode != "iptables" and sysctl.route_localnet():
        _log.warning(
            "net.ipv4.conf.all.route_localnet is 1 (not changed here; kube-proxy and --mode iptables set it):"
            " without a rule against it, neighbors reach what listens on 127.0.0.1"
        )
    if settings.tls is None and not settings.standalone:
        _log.warning("--insecure: plain text, and whoever answers as the server decides this node's rules")
    metrics = AgentMetrics(mode=settings.mode)
    metrics.insecure.set(settings.tls is None and not settings.standalone)
    health = ProxyHealth(node_name=settings.node_name, limit=2 * settings.sync_period)
    addresses = InterfaceAddresses()
    conntrack = ConntrackCleaner(local_ips=lambda: addresses.current, observe=metrics.conntrack)
    service_health = ServiceHealthServers(
        healthy=lambda: health.check().healthy, failing=metrics.health_check_listen_errors.set
    )
    reconciler = Reconciler(
        settings=settings,
        feed=feed,
        dataplane=dataplane,
        families=supported_families(),
        addresses=addresses,
        health=health,
        metrics=metrics,
        followers=(conntrack, service_health, succession, _FreezeFirstState()),
    )
    http = HealthServer(
        listen=settings.http,
        health=health,
        metrics=metrics,
        feed_status=lambda: feed.status,
        mode=settings.mode,
    )
    await http.start()
    work: list[Job] = [
        reconciler.run,
        conntrack.run,
        service_health.run,
        succession.run,
        lambda: sysctl.keep(settings.conntrack),
        *beside,
    ]
    _log.info("node %s, %s, HTTP on port %d", settings.node_name, settings.mode, http.port)
    try:
        await _until_stopped(work)
    finally:
        await http.stop()
        addresses.close()
    return 0


async def _until_stopped(work: Sequence[Job]) -> None:
    """Run all until a signal comes. A failure of one is a bug: it ends all, visibly, and rules stay."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(job()) for job in work]
        await stop.wait()
        for task in tasks:
            task.cancel()


class _FreezeFirstState:
    """Once the first state is in, keeps the collector from walking through it again and again."""

    def __init__(self) -> None:
        self._done = False

    def settled(self, changes: Mapping[ServiceKey, ServiceView | None]) -> None:  # noqa: ARG002
        """See `reconcile.Follower`."""
        if not self._done:
            self._done = True
            gc.collect()
            gc.freeze()

    def nodeport_addresses(self, addresses: Mapping[Family, tuple[str, ...] | None]) -> None:
        """See `reconcile.Follower`."""
