"""One agent a network namespace."""

import errno
import socket
import struct

from rulecast.errors import UsageError

_NAME = b"\0rulecast-agent"


def acquire(name: bytes = _NAME) -> socket.socket:
    """Hold the namespace until the socket is closed or the process ends, however it ends.

    The lock is an abstract unix socket: those belong to the network namespace and leave no file behind
    (unix(7)). Raises UsageError when another agent has it.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        held.bind(name)
        # Listening makes our process id visible to those that come second; nobody accepts them.
        held.listen(socket.SOMAXCONN)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"cannot lock this network namespace: {error.strerror}") from None
        raise UsageError(
            f"another rulecast agent{_holder(name)} runs in this network namespace; two would fight"
        ) from None
    return held


def _holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(name)
            pid = struct.unpack("=iII", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            return ""
    return f" (process {pid})" if pid else ""
