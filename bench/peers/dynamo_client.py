"""Dynamo's selection service (its Rust router core, called from Python), driven in a process of its own."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import zmq

from bench.measured_process import Child, ChildError
from bench.peers.peer_installation import DYNAMO, ensure
from bench.placing.block_workload import BLOCK_SIZE, BlockWorkload, Event, vllm_payload

SCRIPT = Path(__file__).with_name("dynamo_process.py")
SUBSCRIBE_SECONDS = 20
THREADS = 4
"""Threads of its indexer: the package's default."""


class EngineSockets(AbstractContextManager["EngineSockets"]):
    """One event socket per worker, as engines have them; XPUB, which shows when the peer has subscribed."""

    def __init__(self, workers: int) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._sent = [0] * workers
        for _ in range(workers):
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.SNDHWM, 0)  # no loss: the peer's answers are compared
            socket.bind("tcp://127.0.0.1:*")
            self._sockets.append(socket)
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in self._sockets]

    def wait(self) -> None:
        """Wait until every socket has a subscriber."""
        for socket in self._sockets:
            if not socket.poll(SUBSCRIBE_SECONDS * 1000):
                raise ChildError(f"no subscription within {SUBSCRIBE_SECONDS} s")
            socket.recv()

    def publish(self, batches: Iterable[Sequence[Event]]) -> None:
        """Publish batches, each of one worker, as vLLM frames them."""
        for batch in batches:
            worker = batch[0].worker
            self._sockets[worker].send_multipart([b"", self._sent[worker].to_bytes(8, "big"), vllm_payload(*batch)])
            self._sent[worker] += 1

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


class Dynamo(Child):
    """The running service. Raises ``PeerMissingError`` where it cannot be installed."""

    def __init__(self) -> None:
        python = ensure(DYNAMO) / "python"
        # -P keeps this folder off sys.path. No log: writing it would cost the peer time.
        super().__init__(str(DYNAMO), [str(python), "-P", str(SCRIPT)], {"DYN_LOG": "off", "RUST_LOG": "off"})

    def start(self, endpoints: Sequence[str], block_size: int) -> None:
        """Start with an empty index over workers that publish at ``endpoints``."""
        self.call("start", threads=THREADS, block_size=block_size, endpoints=list(endpoints))

    def load(self, prompts: Sequence["array[int]"]) -> None:
        """Hand over prompts; other methods refer to them by number."""
        path = self.folder / "prompts"
        path.write_bytes(b"".join(ids.tobytes() for ids in prompts))
        self.call("load", path=str(path), lengths=[len(ids) for ids in prompts])

    def select(self, number: int) -> tuple[float, int]:
        """Place a prompt; return microseconds and the winner's overlap in blocks."""
        answer = self.call("select", number=number)
        return answer["us"], answer["overlap"]

    def settle(self, blocks: Sequence[int], seconds: float = 60) -> float:
        """Wait until worker n shows ``blocks[n]`` blocks of prompt n; return the CPU seconds used so far."""
        return float(self.call("settle", blocks=list(blocks), seconds=seconds)["cpu"])

    def cpu(self) -> float:
        """Return the CPU seconds used so far."""
        return float(self.call("cpu")["cpu"])


@contextmanager
def fed_dynamo(load: BlockWorkload) -> Iterator[tuple[Dynamo, Callable[[Iterable[Sequence[Event]]], None]]]:
    """Start the service with the workload's workers and probes; yields it and what publishes engines' batches."""
    with Dynamo() as dynamo, EngineSockets(load.workers) as sockets:
        dynamo.start(sockets.endpoints, BLOCK_SIZE)
        sockets.wait()
        dynamo.load(load.probes)
        yield dynamo, sockets.publish
