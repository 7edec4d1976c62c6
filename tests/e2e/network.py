"""The network of a one-node cluster: a namespace of its own, which a pair of interfaces joins to the machine.

The machine reaches the node, its pods and its Services by one route; from inside, nothing but the machine is reached.
"""

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NUMBERS = range(200, 250)
"""Second numbers of the ranges ``10.N.0.0/16`` that are tried."""


@dataclass(frozen=True)
class Network:
    """Addresses and names of the network ``10.NUMBER.0.0/16``."""

    number: int

    @property
    def name(self) -> str:
        """The namespace, and the node's control group."""
        return f"mmrouter-{self.number}"

    @property
    def node(self) -> str:
        """The node's address: of the API server, the name server and the kubelet."""
        return f"10.{self.number}.0.1"

    @property
    def machine(self) -> str:
        """The address by which the node and its pods see this machine."""
        return f"10.{self.number}.0.2"

    @property
    def pods(self) -> str:
        return f"10.{self.number}.1.0/24"

    @property
    def services(self) -> str:
        return f"10.{self.number}.16.0/20"

    @property
    def first_service(self) -> str:
        """The API server's own Service."""
        return f"10.{self.number}.16.1"

    @property
    def whole(self) -> str:
        return f"10.{self.number}.0.0/16"

    @property
    def interface(self) -> str:
        """The machine's end of the pair."""
        return f"mmr{self.number}"

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command line begins with that runs in the namespace."""
        # Not ``ip netns exec``: that mounts /sys anew, without the control groups in it.
        return ("nsenter", f"--net=/run/netns/{self.name}")


def ip(*arguments: str) -> str:
    """Run ``ip`` and return what it printed. Raises ``CalledProcessError``."""
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
    """Join the namespace to the machine. Raises ``CalledProcessError``."""
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
