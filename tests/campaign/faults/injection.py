"""Faults of one process, of its connections, or of the disk, each with what ends it."""

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from campaign.faults import clock
from campaign.faults.clock import STEP_SECONDS, home_of, set_clock
from campaign.faults.packet_delay import QUEUE, PacketDelay

PROCESSES = ("router", "sidecar", "vllm")
"""Commands of the processes of ``mmrouter up``, as they are in their command lines."""
OF_A_PROCESS = ("kill", "stop", "descriptors", "memory", "file_size", "disk_full")
OF_THE_CLOCK = ("clock_back", "clock_forward", "kill_clock_back", "kill_clock_forward")
"""Steps of the victim's wall clock by an hour. With ``kill``, the victim is killed then and starts on that clock."""
OF_THE_NETWORK = ("feed_cut", "engine_cut", "loss", "slow", "delay")
SPARE_BYTES = 4 << 20  # of address space above what a process has, under ``memory``
LOSS = 0.05  # share of packets
RATE = "6mbit"  # of the whole loopback interface, under ``slow``
DELAY_SECONDS = 0.05  # of every packet, under ``delay``; an answer takes two of them at least
FEED_PORTS, ENGINE_PORT = "7557:7558", "8000"


@dataclass(frozen=True)
class Victim:
    """A process of a pod. Its ``address`` is the pod's."""

    command: str
    pod: str
    address: str
    process: psutil.Process


Undo = Callable[[], None]


def without_clocks() -> str:
    """Return which faults of the clock a target leaves out, and why; empty: none."""
    reason = clock.missing()
    return f"without {', '.join(OF_THE_CLOCK)}: {reason}" if reason else ""


@contextmanager
def injected(fault: str, victim: Victim, disk: Path) -> Iterator[None]:
    """Have a fault until the block ends. Raises ``psutil.NoSuchProcess``, ``OSError``,
    ``subprocess.CalledProcessError``.
    """
    undo = _begin(fault, victim, disk)
    try:
        yield
    finally:
        undo()


def _begin(fault: str, victim: Victim, disk: Path) -> Undo:
    process = victim.process
    match fault:
        case "kill":
            process.kill()
            return lambda: None
        case "stop":
            process.suspend()
            return lambda: _resume(process)
        case "descriptors":
            return _limit(process, resource.RLIMIT_NOFILE, process.num_fds())
        case "memory":
            return _limit(process, resource.RLIMIT_AS, process.memory_info().vms + SPARE_BYTES)
        case "file_size":
            return _limit(process, resource.RLIMIT_FSIZE, 0)
        case "disk_full":
            undo = _fill(disk / "filler")
            process.kill()  # it has to start on a full disk
            return undo
        case "clock_back" | "clock_forward" | "kill_clock_back" | "kill_clock_forward":
            return _step(process, back=fault.endswith("back"), kill=fault.startswith("kill"))
        case "feed_cut":
            return _drop(*_ports(victim.address, FEED_PORTS))
        case "engine_cut":
            return _drop(*_ports(victim.address, ENGINE_PORT))
        case "loss":
            chance = ("-m", "statistic", "--mode", "random", "--probability", str(LOSS))
            return _drop(("-p", "tcp", *chance))
        case "slow":
            queue = ("dev", "lo", "root")
            _tool("tc", "qdisc", "add", *queue, "tbf", "rate", RATE, "burst", "64kb", "latency", "200ms")
            return lambda: _tool("tc", "qdisc", "del", *queue)
        case "delay":
            return _delay()
    raise ValueError(f"unknown fault {fault!r}")


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _limit(process: psutil.Process, kind: int, soft: int) -> Undo:
    before = resource.prlimit(process.pid, kind)
    resource.prlimit(process.pid, kind, (soft, before[1]))

    def undo() -> None:
        with suppress(ProcessLookupError):
            resource.prlimit(process.pid, kind, before)

    return undo


def _step(process: psutil.Process, *, back: bool, kill: bool) -> Undo:
    home = home_of(process)
    try:
        set_clock(home, -STEP_SECONDS if back else STEP_SECONDS)
    except FileNotFoundError:  # its pod's folder is gone
        raise psutil.NoSuchProcess(process.pid) from None
    if kill:
        process.kill()

    def undo() -> None:
        with suppress(FileNotFoundError):
            set_clock(home, 0)

    return undo


def _fill(file: Path) -> Undo:
    with file.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    with file.open("ab", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"\0")
    return file.unlink


def _ports(address: str, ports: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rules for both directions of the connections to these ports of an address."""
    return ("-p", "tcp", "-d", address, "--dport", ports), ("-p", "tcp", "-s", address, "--sport", ports)


def _drop(*rules: tuple[str, ...]) -> Undo:
    return _with_rules(*((*rule, "-j", "DROP") for rule in rules))


def _delay() -> Undo:
    with ExitStack() as delay:  # closed where the rule is refused
        delay.enter_context(PacketDelay(DELAY_SECONDS))
        delay.callback(_with_rules(("-p", "tcp", "-j", "NFQUEUE", "--queue-num", str(QUEUE))))
        return delay.pop_all().close


def _with_rules(*rules: tuple[str, ...]) -> Undo:
    """Add rules for packets that arrive."""
    for rule in rules:
        _tool("iptables", "-w", "-A", "INPUT", *rule)

    def undo() -> None:
        for rule in rules:
            _tool("iptables", "-w", "-D", "INPUT", *rule)

    return undo


def _tool(*command: str) -> None:
    subprocess.run(
        command, check=True, capture_output=True, env={**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin"}
    )
