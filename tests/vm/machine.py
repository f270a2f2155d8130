"""A virtual machine for what this machine's kernel lacks: User Mode Linux, over this machine's files.

`python -m tests.vm.machine COMMAND...` runs a command in it, as root in the checkout. It sees the host's
files read-only; what is written to /tmp, /run and /dev/shm is gone when it ends. It has one processor, boots
in 2 s and runs programs at the processor's speed; only system calls cost more.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[2]
_BUILD = Path(__file__).with_name("build-kernel")
_SEARCH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHARED = "/run/host"
_LEAST_MEMORY = 1 << 30
SCHEDULERS = ("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "mh")
_INIT = f"""#!/bin/sh
export PATH={_SEARCH} HOME=/tmp PYTHONDONTWRITEBYTECODE=1 NO_COLOR=1
mount -t proc proc /proc
mount -t sysfs sys /sys
for place in /tmp /run /dev/shm /lib/modules; do mkdir -p $place; mount -t tmpfs tmpfs $place; done
# A checkout below one of these is hidden by now.
[ -e CHECKOUT/pyproject.toml ] || {{ mkdir -p CHECKOUT && mount -t hostfs -o ro,CHECKOUT none CHECKOUT; }}
mkdir -p /dev/pts && mount -t devpts devpts /dev/pts
# Everything is built in; modprobe has to know.
modules=/lib/modules/$(uname -r)
mkdir $modules && touch $modules/modules.order
for name in dummy ip_vs {" ".join(f"ip_vs_{name}" for name in SCHEDULERS)}; do
    echo kernel/$name.ko
done >$modules/modules.builtin
depmod 2>/dev/null
mkdir -p {_SHARED} /run/lock && mount -t hostfs -o DIRECTORY none {_SHARED}
ip link set lo up
stty -onlcr 2>/dev/null
sh {_SHARED}/command
echo $? >{_SHARED}/code
poweroff -f -d -n >/dev/null 2>&1
"""


class Unavailable(Exception):
    """No virtual machine can run here; `str()` is one line."""


class Result(NamedTuple):
    """What became of the command."""

    code: int
    output: str
    seconds: float


def kernel() -> Path:
    """The kernel, built if need be. Raises Unavailable."""
    if platform.machine() != "x86_64":
        raise Unavailable(f"User Mode Linux is for x86_64, this machine is {platform.machine()}")
    if os.geteuid():
        raise Unavailable("only root can read all that the virtual machine shows")
    done = subprocess.run([_BUILD], capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise Unavailable(f"no kernel for the virtual machine: {why[-1]} (tests/vm/build-kernel)")
    return CHECKOUT / done.stdout.strip()


def _memory_place() -> str:
    """Where the file goes that is the machine's memory; a container's /dev/shm may be of 64 MB."""
    return "/dev/shm" if shutil.disk_usage("/dev/shm").total >= _LEAST_MEMORY else "/var/tmp"


def run(
    command: str,
    *,
    timeout: float,
    memory: str = "3G",
    environment: dict[str, str] | None = None,
    show: bool = False,
) -> Result:
    """Boot, run a shell command, and power off; its code is 124 when that takes more than `timeout` seconds.

    `show`: its output goes to ours as it comes, and is not in the result. Raises Unavailable.
    """
    linux = str(kernel())
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rulecast-vm-") as name:
        shared = Path(name)
        exports = [f"export {key}={shlex.quote(value)}" for key, value in (environment or {}).items()]
        (shared / "command").write_text(
            "\n".join([*exports, f"cd {shlex.quote(str(CHECKOUT))}", command, ""])
        )
        init = shared / "init"
        init.write_text(_INIT.replace("DIRECTORY", name).replace("CHECKOUT", str(CHECKOUT)))
        init.chmod(0o755)
        # It ends with us however we end.
        argv = ["setpriv", "--pdeathsig", "TERM", linux]
        argv += [f"mem={memory}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"]
        argv += [f"init={init}", "con=null", "con0=null,fd:1", "con1=fd:0,fd:1", "quiet"]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": _SEARCH, "TMPDIR": _memory_place()},
            text=True,
            errors="replace",
            # The kernel's processes are threads and children of it, in a group of their own.
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, 9)
            raise
        code = shared / "code"
        found = int(code.read_text()) if code.exists() else 124
    return Result(found, output or "", time.monotonic() - begin)


if __name__ == "__main__":
    try:
        result = run(" ".join(sys.argv[1:]), timeout=float(os.environ.get("VM_TIMEOUT", "900")), show=True)
    except Unavailable as error:
        sys.exit(str(error))
    print(f"{result.seconds:.0f} s", file=sys.stderr)
    sys.exit(result.code)
