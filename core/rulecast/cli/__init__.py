"""The `rulecast` command. Each subcommand imports only what it needs."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from rulecast.errors import UsageError

_COMMANDS = {
    "server": ("rulecast_server.app", "watch the apiserver once and stream rules to agents"),
    "agent": ("rulecast.cli.agent", "program this node's kernel"),
    "cleanup": ("rulecast_agent.cleanup", "remove everything that an agent put into this kernel"),
    "certs": ("rulecast_server.certs.command", "make or renew the servers' certificate"),
    "demo": ("rulecast.cli.demo", "a small cluster in network namespaces, with real traffic"),
}


def _help() -> str:
    lines = ["usage: rulecast COMMAND [FLAGS]", "", "commands:"]
    lines += [f"  {name:<8} {text}" for name, (_, text) in _COMMANDS.items()]
    lines += [
        "",
        "`rulecast COMMAND --help` lists a command's flags; `rulecast --version` prints the version.",
    ]
    return "\n".join(lines)


def version_text() -> str:
    """The version of the installed package."""
    try:
        return version("rulecast")
    except PackageNotFoundError:
        return "unknown (not installed)"


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises UsageError for bad input."""
    if not argv:
        raise UsageError("no command given; `rulecast --help` lists them")
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"rulecast {version_text()}")
        return 0
    if name not in _COMMANDS:
        raise UsageError(f"no command {name!r}; `rulecast --help` lists them")
    command: Callable[[Sequence[str]], int] = import_module(_COMMANDS[name][0]).main
    return command(rest)


def main() -> int:
    """Entry point of the console script."""
    try:
        return run(sys.argv[1:])
    except UsageError as error:
        print(f"rulecast: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
