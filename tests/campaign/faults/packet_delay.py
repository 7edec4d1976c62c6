"""Delay of packets by a queue of Netfilter, where the kernel has no netem.

An iptables rule with the target NFQUEUE hands each packet's number to the queue and holds the packet until a verdict.
Messages are those of ``linux/netfilter/nfnetlink_queue.h``; netlink is in the machine's byte order, the fields of
Netfilter are big-endian.
"""

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Self

QUEUE = 1
_NETFILTER, _FORCED_BUFFER = 12, 33  # NETLINK_NETFILTER, SO_RCVBUFFORCE
_PACKET, _CONFIG, _BATCH = 0x300, 0x302, 0x303  # subsystem 3, and what a message is
_COMMAND, _PARAMETERS, _LENGTH, _PACKET_HEADER, _VERDICT = 1, 2, 3, 1, 2  # attributes
_BIND, _NUMBERS_ONLY, _ACCEPT = 1, 1, 1
_HELD = 1 << 16  # packets
_BUFFER = 8 << 20  # bytes


class PacketDelay:
    """Holds every packet that a rule gives to the queue for as long, in their order, until it is closed.

    The queue is that of the network namespace of the thread that creates it. Raises ``OSError`` without the rights.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._ends = seconds, threading.Event()
        self._held: deque[tuple[float, int]] = deque()
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        self._socket.setsockopt(socket.SOL_SOCKET, _FORCED_BUFFER, _BUFFER)
        self._send(_CONFIG, _COMMAND, struct.pack(">BxH", _BIND, socket.AF_INET))
        self._send(_CONFIG, _PARAMETERS, struct.pack(">IB", 0, _NUMBERS_ONLY))
        self._send(_CONFIG, _LENGTH, struct.pack(">I", _HELD))
        self._thread = threading.Thread(target=self._run, name="packet-delay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the delay; packets that are held are let through first. The rule has to be removed before."""
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while self._held or not self._ends.is_set():
            now = time.monotonic()
            due = self._held[0][0] - now if self._held else self._seconds
            if select.select([self._socket], [], [], max(0.0, due))[0]:
                now = time.monotonic()
                self._held.extend((now + self._seconds, number) for number in _packets(self._socket.recv(1 << 16)))
            last = None
            while self._held and self._held[0][0] <= time.monotonic():
                last = self._held.popleft()[1]
            if last is not None:  # a verdict on this packet and all before it
                self._send(_BATCH, _VERDICT, struct.pack(">II", _ACCEPT, last))

    def _send(self, kind: int, attribute: int, value: bytes) -> None:
        content = struct.pack(">BBH", socket.AF_UNSPEC, 0, QUEUE)
        content += struct.pack("=HH", 4 + len(value), attribute) + value + bytes(-len(value) % 4)
        self._socket.send(struct.pack("=IHHII", 16 + len(content), kind, 1, 0, 0) + content)


def _packets(data: bytes) -> Iterator[int]:
    """Yield the numbers of the packets in netlink messages."""
    at = 0
    while at + 16 <= len(data):
        length, kind = struct.unpack_from("=IH", data, at)
        part, end = at + 20, at + length
        while kind == _PACKET and part + 4 <= end:
            size, attribute = struct.unpack_from("=HH", data, part)
            if attribute == _PACKET_HEADER:
                yield struct.unpack_from(">I", data, part + 4)[0]
            part += (size + 3) & ~3
        at += (length + 3) & ~3
