"""The network and the control groups of a one-node cluster, and what takes both away.

The network is a namespace of its own, which a pair of interfaces joins to the machine. The machine reaches the node,
its pods and its Services by one route; from inside, nothing but the machine is reached. All pods are below one control
group, by which they are ended: of version 1, one hierarchy per controller, or of version 2, one for all.

    python network.py NAME    # outlives a test run just long enough to take its node away, however the run ended

At the end of its input, which the kernel brings about even when the run was killed, it kills the pods and removes the
control group and the network namespace of that name, both interfaces and the route with it. Mounts need no removal:
they are in a mount namespace that ends with its processes.
"""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NUMBERS = range(200, 250)
"""Second numbers of the ranges ``10.N.0.0/16`` that are tried."""


class Network:
    """Addresses and names of the network ``10.NUMBER.0.0/16``. ``name``: the namespace, and the node's control group.
    ``node``: the address of API server, name server and kubelet. ``machine``: the address by which the node and its
    pods see this machine, ``interface`` its end of the pair. ``first_service``: the API server's own. ``enter``: what a
    command line begins with that runs in the namespace.
    """

    def __init__(self, number: int) -> None:
        begin = f"10.{number}"
        self.number, self.name, self.interface = number, f"mmrouter-{number}", f"mmr{number}"
        self.node, self.machine, self.first_service = f"{begin}.0.1", f"{begin}.0.2", f"{begin}.16.1"
        self.whole, self.pods, self.services = f"{begin}.0.0/16", f"{begin}.1.0/24", f"{begin}.16.0/20"
        # Not ``ip netns exec``: that mounts /sys anew, without the control groups in it.
        self.enter = ("nsenter", f"--net=/run/netns/{self.name}")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def free_numbers() -> Iterator[int]:
    """Return the networks that overlap with no route of this machine."""
    routes = [row["dst"] for row in json.loads(ip("-json", "route", "show", "table", "all"))]
    taken = [ipaddress.ip_network(dst) for dst in routes if dst[0].isdigit() and ":" not in dst]
    for number in NUMBERS:
        wanted = ipaddress.ip_network(f"10.{number}.0.0/16")
        # A default route is no claim.
        if not any(wanted.overlaps(each) for each in taken if each.prefixlen):
            yield number


@contextmanager
def network() -> Iterator[Network]:
    """Make a network; the block's end takes it away. Raises ``RuntimeError`` when all numbers are taken."""
    made = None
    for number in free_numbers():
        try:
            ip("netns", "add", Network(number).name)  # fails where another process was faster
        except subprocess.CalledProcessError:
            continue
        made = Network(number)
        break
    if made is None:
        raise RuntimeError("no network is free")
    try:
        join(made)
        yield made
    finally:
        remove(made.name)


def join(network: Network) -> None:
    name, inside, outside = network.name, "node0", network.interface
    ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
    ip("address", "add", f"{network.machine}/30", "dev", outside)
    ip("link", "set", outside, "up")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "address", "add", f"{network.node}/30", "dev", inside)
    ip("-n", name, "link", "set", inside, "up")
    # An address of a Service is translated after it was routed, so it needs a route, wherever that leads.
    ip("-n", name, "route", "add", "default", "via", network.machine)
    ip("route", "add", network.whole, "via", network.node)
    for setting in ("net.ipv4.ip_forward=1", "net.bridge.bridge-nf-call-iptables=1"):
        subprocess.run([*network.enter, "sysctl", "-qw", setting], check=True, capture_output=True)


def remove(name: str) -> None:
    """Take a namespace away, and with it both interfaces and the route. One that is not there is no error."""
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


KILL_SECONDS = 10.0
_CPUSET = ("cpuset.cpus", "cpuset.mems")
# All pods together would have the processor's time of one process of this machine, however many run beside them.
_WEIGHT = {"cpu.shares": 16384, "cpu.weight": 1600}


def hierarchies() -> list[Path]:
    """Return where the hierarchies are mounted; runtimes make groups in those without controllers, too."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in {"cgroup", "cgroup2"}:
            found.append(Path(before.split()[4]))
    return found


def make_group(name: str) -> None:
    for root in hierarchies():
        group = root / name
        group.mkdir(exist_ok=True)
        for setting in _CPUSET:  # a new set of version 1 is empty, and takes no process
            if (group / setting).is_file() and not (group / setting).read_text().strip():
                (group / setting).write_text((root / setting).read_text())
        for setting, weight in _WEIGHT.items():
            if (group / setting).is_file():
                (group / setting).write_text(str(weight))


def remove_group(name: str) -> None:
    """Kill what is in a group, below it too, and remove it everywhere. One that is not there is no error."""
    groups = [root / name for root in hierarchies()]
    deadline = time.monotonic() + KILL_SECONDS
    while (pids := {pid for group in groups for pid in members(group)}) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for group in groups:
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def members(group: Path) -> Iterator[int]:
    for folder, _, files in os.walk(group):
        if "cgroup.procs" in files:
            with contextlib.suppress(OSError):  # the group is just going
                yield from map(int, Path(folder, "cgroup.procs").read_text().split())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove_group(sys.argv[1])
    remove(sys.argv[1])


if __name__ == "__main__":
    main()
