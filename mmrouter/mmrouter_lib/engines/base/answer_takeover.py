"""How engines can continue an answer of another engine: what they give alike, and how they take its token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Obstacle = Literal[
    "bad_words", "choices", "field", "grammar", "logprobs", "penalties", "prompts", "reasoning", "stop", "tools"
]
"""What makes the rest of an answer depend on where the answer began (docs/streams.md)."""

Way = Literal["repeated", "seeded", "token_ids"]
"""How a stream is continued: its answer is the same everywhere, is so because of a seed that the router adds, or is
continued from its token ids."""


class AnswerTraits(NamedTuple):
    """What flags and model decide about the answers of a deployment's engines.

    ``reproducible``: the sampled answers that every engine gives alike: those of requests with a seed, all, or none.
    ``reasoning``: whether the engines separate reasoning from the answer. ``tools``: whether they find
    calls of tools in it.
    """

    reproducible: Literal["none", "seeded", "all"] = "none"
    reasoning: bool = False
    tools: bool = False


class ContinuationError(ValueError):
    """A rendered prompt cannot be continued; the message says why. ``obstacle``: ``None`` if not in the request."""

    def __init__(self, message: str, obstacle: Obstacle | None = None) -> None:
        super().__init__(message)
        self.obstacle = obstacle


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContinuation:
    """Paths and shapes of an engine type. The engine renders the request, then continues prompt and answer as ids."""

    prompt_paths: Mapping[str, str]
    """Path of a request -> endpoint that takes the same request and answers with the prompt that `build` reads."""
    generate_path: str  # endpoint that takes the request that `build` returns and answers with a stream
    text_path: str  # takes `text_request`, answers what `ends_whole` reads

    obstacle: Callable[[str, Mapping[str, Any]], Obstacle | None]
    """Path and fields of a request -> why appending the answer's tokens to its prompt does not continue the answer."""
    reporting: Mapping[str, Any]  # fields of a request whose stream then holds the ids of its tokens
    strip: Callable[[bytes], bytes]  # return events without those ids
    text_request: Callable[[str, Sequence[int]], bytes]  # model and the last tokens of an answer
    ends_whole: Callable[[bytes], bool]  # return whether their text ends with a whole character
    build: Callable[[bytes, Sequence[int]], bytes]
    """Return the request that continues a rendered prompt after these tokens. Raises :class:`ContinuationError`."""
    as_chunk: Callable[[Mapping[str, Any], str, Mapping[str, Any], int], dict[str, Any]]
    """Chunk of the stream, path and fields of the request, number of tokens before the chunk -> the chunk in the form
    of that path, with empty id, object, created and model."""
