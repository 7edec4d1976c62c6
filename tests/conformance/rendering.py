"""A real ``vllm launch render``: what vLLM makes of a chat request, without a GPU and without a model."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from conformance.engine_process import addresses, environment, is_healthy, require_memory, server, wait_healthy
from conformance.own_code import Prompts, answer_of

PORT = 8000
OWN_PROMPTS = Path(__file__).parent / "vllm" / "own_prompts.py"


@dataclass(frozen=True)
class Rendered:
    """An answer: its status, the token ids of the expanded prompt, and (identifier, offset, length) of each image."""

    status: int
    body: dict[str, Any]

    @property
    def ids(self) -> list[int]:
        assert self.status == 200, self.body
        return list(self.body["token_ids"])

    @property
    def images(self) -> list[tuple[str, int, int]]:
        features = self.body.get("features") or {}
        places = (features.get("mm_placeholders") or {}).get("image", ())
        names = (features.get("mm_hashes") or {}).get("image", ())
        return [(name, at["offset"], at["length"]) for name, at in zip(names, places, strict=True)]


@dataclass(frozen=True)
class Renderer:
    client: httpx.Client
    process: "subprocess.Popen[bytes] | None" = None

    def render(self, body: dict[str, Any]) -> Rendered:
        # The server closes the connection after a 500, so none is used twice.
        asked, headers = {**body, "mm_payload": "none"}, {"connection": "close"}
        answer = self.client.post("/v1/chat/completions/render", json=asked, headers=headers)
        decoded = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}
        return Rendered(answer.status_code, decoded)


@contextmanager
def renderer(
    env: Path,
    model_dir: Path,
    log: Path,
    *extra: str,
    wrapper: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Renderer]:
    """Run a renderer over a model folder until the block ends. Skips where there is no memory for it. ``wrapper``
    stands before its command, ``variables`` in its environment.
    """
    require_memory()
    ip = addresses().next_pod()
    command = [str(env / "bin" / "vllm"), "launch", "render", str(model_dir), "--host", ip, "--port", str(PORT)]
    argv = [*wrapper, *command, "--served-model-name", model_dir.name, "--max-model-len", "8192", *extra]
    with (
        server(argv, log, environment(env, ip, log.parent) | dict(variables)) as process,
        httpx.Client(base_url=f"http://{ip}:{PORT}", timeout=60) as client,
    ):
        wait_healthy(process, log, partial(is_healthy, client))
        yield Renderer(client, process)


def own_prompts(
    env: Path, asked: Mapping[Path, Mapping[str, Any]], packages: Sequence[Path] = ()
) -> dict[Path, Prompts]:
    """Return vLLM's prompts for each folder, of one process, which takes longer to start than to answer.

    ``asked``: the bodies of each kind, as ``own_prompts.py`` reads them; answers are in its order. ``packages``:
    folders of modules that the environment lacks.
    """
    bodies = [{"folder": str(folder), **kinds} for folder, kinds in asked.items()]
    answers = answer_of(env, [OWN_PROMPTS, *packages], bodies)
    return {folder: Prompts(found) for folder, found in zip(asked, answers, strict=True)}
