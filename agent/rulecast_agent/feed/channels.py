"""gRPC channels to servers: one for each, kept for life, made anew only for new TLS files."""

import asyncio
import ssl
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec

from rulecast.errors import UsageError

_MAX_FRAME = 16 << 20
"""Frames are below 1 MiB; a single Service object's lists could make one larger."""


class ClientTls(NamedTuple):
    """PEM files: the CA of the servers, and our own certificate and key where the servers want one."""

    server_ca: Path
    cert: Path | None = None
    key: Path | None = None


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Transport. Seconds."""

    tls: ClientTls | None = None
    """None: plain text."""
    server_name: str = ""
    """The name that the server's certificate must have, when that is not the host of its address."""
    keepalive_time: float = 30.0
    """Not below the server's min_ping_interval."""
    keepalive_timeout: float = 10.0
    connect_backoff: float = 5.0
    """The longest pause between gRPC's own attempts to connect."""


class Channels:
    """Hands out the channel of a server."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stamp: tuple[tuple[int, int], ...] | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self.rebuilds = 0
        """Times that channels were made anew for changed files."""

    async def get(self, server: str) -> grpc.aio.Channel:
        """The channel to a server. To be asked before each stream, and with no stream open.

        gRPC cannot change the certificates of a channel (grpc/grpc#15735).
        """
        if self._settings.tls is not None:
            await self._follow(self._settings.tls)
        channel = self._channels.get(server)
        if channel is None:
            channel = self._channels[server] = self._open(server)
        return channel

    async def drop(self, server: str) -> None:
        """Forget a channel whose connection is dead without gRPC knowing it yet."""
        channel = self._channels.pop(server, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all."""
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            await channel.close()

    async def _follow(self, tls: ClientTls) -> None:
        try:
            stamp, credentials = await asyncio.to_thread(_load, tls, self._stamp)
        except UsageError:
            # Half-way through a rotation; what we have may be good for longer.
            if self._credentials is None:
                raise
            return
        if credentials is not None:
            if self._credentials is not None:
                self.rebuilds += 1
                await self.close()
            self._stamp, self._credentials = stamp, credentials

    def _open(self, server: str) -> grpc.aio.Channel:
        settings = self._settings
        options: list[tuple[str, int | str]] = [
            ("grpc.keepalive_time_ms", int(settings.keepalive_time * 1000)),
            ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # While another ping is on its way, no keepalive is sent, and that one waits for a minute.
            ("grpc.http2.ping_timeout_ms", int(settings.keepalive_timeout * 1000)),
            # Instead of measuring the bandwidth by a ping for each frame: enough for a snapshot in a few
            # round trips, and all that a server has to hold for a reader that stops.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 256 << 10),
            # Channels to one server must not share a connection: a new channel is to be a new connection.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", _MAX_FRAME),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", int(settings.connect_backoff * 1000)),
            # Nodes have proxies set for other things.
            ("grpc.enable_http_proxy", 0),
        ]
        if self._credentials is None:
            return grpc.aio.insecure_channel(server, options=options)
        if settings.server_name:
            options.append(("grpc.ssl_target_name_override", settings.server_name))
        return grpc.aio.secure_channel(server, self._credentials, options=options)


def check_tls(tls: ClientTls) -> None:
    """Raises UsageError when the files cannot be used."""
    _load(tls, None)


def _load(
    tls: ClientTls, seen: tuple[tuple[int, int], ...] | None
) -> tuple[tuple[tuple[int, int], ...], grpc.ChannelCredentials | None]:
    """Read the files, unless they are those `seen`."""
    files = [path for path in tls if path is not None]
    try:
        stamp = tuple((path.stat().st_mtime_ns, path.stat().st_ino) for path in files)
        if stamp == seen:
            return stamp, None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
        context.load_verify_locations(tls.server_ca)
        ca, cert, key = (path.read_bytes() if path is not None else None for path in tls)
    except ssl.SSLError as error:
        reason = f"not a matching certificate and key, or not a CA ({error.reason or error})"
        raise UsageError(f"TLS files {', '.join(map(str, files))}: {reason}") from None
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
    return stamp, grpc.ssl_channel_credentials(ca, key, cert)
