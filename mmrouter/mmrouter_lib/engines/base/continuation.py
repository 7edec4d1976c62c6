"""How an engine type continues an answer from its token ids, if it can."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class ContinuationError(ValueError):
    """A rendered prompt cannot be continued; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenContinuation:
    """Paths and shapes of an engine type. The engine renders the request, then continues prompt and answer as ids."""

    prompt_path: str  # endpoint that takes a chat and answers with the rendered prompt that `build` reads
    generate_path: str  # endpoint that takes the request that `build` returns and answers with a stream
    text_path: str  # takes `text_request`, answers what `ends_whole` reads

    applies: Callable[[Mapping[str, Any]], bool]
    """Return whether appending the tokens of an answer to a request's prompt continues it: nothing that the request
    asks for depends on where the answer begins."""
    reporting: Mapping[str, Any]  # fields of a request whose stream then holds the ids of its tokens
    strip: Callable[[bytes], bytes]  # return events without those ids
    text_request: Callable[[str, Sequence[int]], bytes]  # model and the last tokens of an answer
    ends_whole: Callable[[bytes], bool]  # return whether their text ends with a whole character
    build: Callable[[bytes, Sequence[int]], bytes]
    """Return the request that continues a rendered prompt after these tokens. Raises :class:`ContinuationError`."""
    as_chunk: Callable[[Mapping[str, Any], int], dict[str, Any]]
    """Return a chunk of the stream as a chat's, without id, created and model; ``sent``: tokens of the answer before
    it."""
