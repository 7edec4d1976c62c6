"""What an engine reports about itself when it comes up."""

import msgspec


class EngineInfo(msgspec.Struct, frozen=True):
    """The answers of an engine's information endpoints, as far as routing depends on them."""

    version: str
    """Release of the engine, empty where it does not report one."""
    facts: dict[str, str] = {}
    """Settings that an image's identity depends on: name -> text, JSON but for ``version`` and ``model_type``."""
    block_size: int | None = None
    """Tokens per block of the events, ``None`` where the answers do not have it."""
    publishes: bool = True
    """Whether the engine says nothing against publishing KV events."""
