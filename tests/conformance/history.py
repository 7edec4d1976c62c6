"""What a real vLLM holds, by its own replayed events alone: read by code that shares nothing with a sidecar."""

import json
from collections import Counter
from pathlib import Path

import pytest
import zmq
from local.rig import Deployment

from mmrouter_lib.block_keys import chain, namespace_seed
from mmrouter_lib.engines.base.events import Cleared, Removed, Stored
from mmrouter_lib.engines.vllm.events import decode_batch

END = b"\xff" * 8


class History:
    """The blocks of one engine, and how often one of them was removed."""

    def __init__(self, deployment: Deployment, ip: str, repository: str) -> None:
        self._ip = ip
        environment = next(iter(deployment.processes("router").values())).environ()
        key = Path(environment["MMROUTER_CONFIG"], "secrets", "identity.key").read_bytes()
        self._seed = namespace_seed(key, model=repository, revision=_revision(environment))
        self.removed = self.most_copies = 0

    def keys(self) -> set[str]:
        """Return the keys of all that it holds now, as the control API writes them."""
        copies: Counter[int] = Counter()
        key_of: dict[int, int] = {}
        self.removed = 0
        for payload in _replay(self._ip):
            for event in decode_batch(payload).events:
                match event:
                    case Stored():
                        parent = self._seed if event.parent is None else key_of[event.parent]
                        keys = chain(event.ids, event.block_size, len(event.hashes), event.extras, parent)
                        key_of.update(zip(event.hashes, keys, strict=True))
                        copies.update(event.hashes)
                        self.most_copies = max(self.most_copies, *copies.values())
                    case Removed():
                        copies.subtract(event.hashes)
                        self.removed += len(event.hashes)
                    case Cleared():
                        copies.clear()
        assert min(copies.values(), default=0) >= 0
        return {f"{key_of[block]:016x}" for block, count in copies.items() if count}


def _revision(environment: dict[str, str]) -> str:
    spec = json.loads(Path(environment["MMROUTER_CONFIG"], "deployment.json").read_text())["spec"]
    return spec["model"].get("revision", "main")


def _replay(ip: str) -> list[bytes]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.connect(f"tcp://{ip}:5657")
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        payloads = []
        while dealer.poll(10_000):
            parts = dealer.recv_multipart()
            if parts[-2] == END:
                return payloads
            payloads.append(parts[-1])
    pytest.fail(f"the engine at {ip} did not replay its events")
