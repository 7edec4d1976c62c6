"""Names that vLLM gives to images under a request's options (docs/engine-facts/vllm.md#options-of-a-request).

A name is a BLAKE3 hash of the model's name or path as the engine was started with it, the image's ``uuid`` and the
options as the client wrote them: values with their lengths in front, and a tag for what each is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from blake3 import blake3

from mmrouter_lib.media_identity import framed

TRUST: Final = "--trust-request-mm-kwargs"
"""The flag with which vLLM takes processor options from a request."""
_MAPPING, _LEAF = b"\x02", b"\x03"


def trusts_options(args: Sequence[Sequence[str]]) -> bool:
    """Return whether engines with these arguments all take a request's options, and name items by BLAKE3."""
    changing = ("--no-trust-request-m", "--mm-h")  # vLLM takes flags shortened
    return bool(args) and all(
        TRUST in each and not any(arg.replace("_", "-").startswith(changing) for arg in each) for each in args
    )


def name_with_options(uuid: str, options: Mapping[str, int], model: str) -> str:
    """Return the name of an image under options (name -> a number below 2**63), in the order of the request."""
    hasher = blake3()
    for chunk in _chunks(uuid, options, model):
        hasher.update(chunk)
    return hasher.hexdigest()


def _chunks(uuid: str, options: Mapping[str, int], model: str) -> Iterator[bytes]:
    yield from (framed(b"image"), _LEAF, framed(uuid.encode()))
    yield from (framed(b"mm_processor_kwargs"), _MAPPING, len(options).to_bytes(8, "little"))
    for name, value in options.items():
        yield from (framed(name.encode()), _LEAF, framed(value.to_bytes(8, "little")))
    yield from (framed(b"model_id"), _LEAF, framed(model.encode()))
