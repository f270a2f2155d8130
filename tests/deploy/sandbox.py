"""A command as a container would run it, without a container engine.

What is the same: user, capabilities, no new privileges, a root file system and a /proc/sys that cannot be
written, mounts, environment. What is not: seccomp, AppArmor, cgroups and the image; the file tree is this
machine's.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
_CAPABILITIES = "--bounding-set=-all"
_IMAGE = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
"""What the image sets, but for where programs are."""


class Mount(msgspec.Struct, frozen=True):
    """A path of the host at a path of the container."""

    source: str
    target: str
    read_only: bool = False


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime is told."""

    argv: Sequence[str]
    """As the image's entry point `rulecast` gets it, unless `program` says otherwise."""
    program: Sequence[str] = (sys.executable, "-m", "rulecast.cli")
    user: int = 0
    capabilities: Sequence[str] = ()
    """NET_ADMIN and the like; no others, not even of root."""
    mounts: Sequence[Mount] = ()
    environment: Mapping[str, str] = {}
    hosts: Mapping[str, str] = {}
    """Names beside those in /etc/hosts."""


def start(container: Container, namespace: str, log: Path, **options: object) -> subprocess.Popen[bytes]:
    """Run it in a network namespace, or beside us when that is empty; the process is the command itself."""
    script = "\n".join(_script(container))
    # Whoever could change rules gets a namespace.
    assert namespace or not container.capabilities
    network = ["ip", "netns", "exec", namespace] if namespace else []
    command = [*network, "unshare", "--mount", "--propagation", "private"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**_IMAGE, **container.environment},
            **options,  # type: ignore[call-overload]
        )


def unavailable() -> str:
    """Why this machine cannot do that; empty when it can."""
    probe = "mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w /mnt/r && " + _overlay("/mnt")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", probe], capture_output=True, text=True
    )
    return done.stderr.strip() if done.returncode else ""


def _overlay(base: str) -> str:
    return f"mount -t overlay none -o lowerdir=/,upperdir={base}/u,workdir={base}/w {base}/r"


def _own_files(root: str) -> Iterable[str]:
    """What stands for the image: it may be on another file system, hidden by now, or below a closed home."""
    paths = {Path(each).resolve() for each in (ROOT, sys.prefix, sys.base_prefix)}
    for path in sorted(each for each in paths if paths.isdisjoint(each.parents)):
        inside = shlex.quote(f"{root}{path}")
        yield f"mkdir -p {inside}"
        for parent in path.parents:
            yield f"chmod o+rx {shlex.quote(f'{root}{parent}')}"
        yield f"mount --bind {shlex.quote(str(path))} {inside}"
        yield f"mount -o remount,bind,ro {inside}"


def _script(container: Container) -> Iterable[str]:
    base, root = "/mnt", "/mnt/r"
    yield f"mount -t tmpfs none {base}"
    yield f"mkdir {base}/u {base}/w {root}"
    yield _overlay(base)
    for name, address in container.hosts.items():
        yield f"echo {shlex.quote(f'{address} {name}')} >> {root}/etc/hosts"
    for each in ("/proc", "/dev"):
        yield f"mount --rbind {each} {root}{each}"
    yield f"mount -t sysfs -o ro none {root}/sys"
    yield f"mount --bind {root}/proc/sys {root}/proc/sys"
    yield f"mount -o remount,bind,ro {root}/proc/sys"
    # Nothing of the host's is there that the container does not ask for.
    for hidden in ("/tmp", "/run", "/var/lib/rulecast"):
        yield f"mkdir -p {root}{hidden}"
        yield f"mount -t tmpfs none {root}{hidden}"
    yield from _own_files(root)
    for mount in container.mounts:
        # A link such as /var/run would lead out of the container's tree.
        source, target = shlex.quote(mount.source), shlex.quote(root + os.path.realpath(mount.target))
        make = "touch" if Path(mount.source).is_file() else "mkdir -p"
        yield f"mkdir -p $(dirname {target}); {make} {target}"
        if not Path(mount.source).exists():
            # DirectoryOrCreate, but for the host's tree: it keeps what it has.
            continue
        yield f"mount --bind {source} {target}"
        if mount.read_only:
            yield f"mount -o remount,bind,ro {target}"
    writable = {mount.target for mount in container.mounts}
    for hidden in ("/tmp", "/run", "/var/lib/rulecast"):
        if hidden not in writable:
            yield f"mount -o remount,ro {root}{hidden}"
    yield f"mount -o remount,ro {root}"
    capabilities = ",".join([_CAPABILITIES, *(f"+{name.lower()}" for name in container.capabilities)])
    become = ["setpriv", f"--reuid={container.user}", f"--regid={container.user}", "--clear-groups"]
    become += ["--inh-caps=-all", capabilities, "--no-new-privs", *container.program, *container.argv]
    yield f"cd {root}"
    yield f"exec chroot {root} {shlex.join(become)}"
