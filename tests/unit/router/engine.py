"""An engine that answers the router's own requests with JSON."""

import json

from unit.router.rig import LoopbackEngine


class Engine(LoopbackEngine):
    """Answers everything with one status; ``seen`` has path, body and authorization of each request.

    ``encodes``: the answer to a chat contains embeddings of its images.
    """

    def __init__(self, status: int = 200, *, encodes: bool = False) -> None:
        super().__init__()
        self.status, self.encodes = status, encodes

    @property
    def seen(self) -> list[tuple[str, dict, str]]:
        return [(path, body, headers["authorization"]) for path, headers, body in self.requests]

    async def __aenter__(self) -> "Engine":
        await self.serve()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def respond(self, reader, writer, headers) -> bool:
        answer = json.dumps(_embeddings(self.requests[-1][2]) if self.encodes else {}).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (self.status, len(answer), answer))
        return True


def _embeddings(body: dict) -> dict:
    parts = [part for message in body.get("messages", ()) for part in message["content"]]
    return {"ec_transfer_params": {part["uuid"]: {"item_indices": [0]} for part in parts}}
