"""Command-line parsing that never prints more than one line for a mistake."""

import argparse
import ipaddress
from pathlib import Path
from typing import NamedTuple, NoReturn

from rulecast.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UsageErrors (argparse would print the usage as well)."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message."""
        raise UsageError(message)

    def format_help(self) -> str:
        """Argparse's help, with the default of each flag that has one."""
        for action in self._actions:
            default, text = action.default, action.help or ""
            # Tuples are flags that may be left out; a text that names its default says it better.
            if isinstance(default, (str, int, float)) and not isinstance(default, bool):
                shown = f"{default:g}" if isinstance(default, float) else str(default)
                if shown and default != argparse.SUPPRESS and "default" not in text:
                    action.help = f"{text} (default {shown})" if text else f"default {shown}"
        return super().format_help()


class HostPort(NamedTuple):
    """A TCP address to listen on or to connect to; IPv6 hosts without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def host_port(text: str) -> HostPort:
    """Parse HOST:PORT or [IPV6]:PORT; an empty host means every address.

    Raises argparse.ArgumentTypeError.
    """
    host, colon, port_text = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not port_text.isascii() or not port_text.isdigit() or int(port_text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    if bracketed or ":" in host:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT (IPv6 as [ADDRESS]:PORT)") from None
        if not bracketed:
            raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT (IPv6 as [ADDRESS]:PORT)")
    return HostPort(host or "0.0.0.0", int(port_text))  # noqa: S104  (the documented meaning of an empty host)


def readable_file(text: str) -> Path:
    """A path to an existing readable file.

    Raises argparse.ArgumentTypeError with the system's reason.
    """
    path = Path(text)
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None


def directory(text: str) -> Path:
    """A path to an existing directory.

    Raises argparse.ArgumentTypeError.
    """
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: not a directory")
    return path


def positive_seconds(text: str) -> float:
    """A positive number of seconds; a trailing `s` is allowed.

    Raises argparse.ArgumentTypeError.
    """
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value
