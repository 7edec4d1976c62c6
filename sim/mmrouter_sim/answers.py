"""Generate answers: pseudo text from the model's vocabulary, a function of the prompt and the seed only.

Equal prompts get equal answers on every engine, as with greedy decoding. The text consists of words that are single
tokens, so an answer in the next turn of a chat is tokenized into the same ids, and its blocks are found again.
"""

import hashlib
import random
from array import array
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from mmrouter_sim.core.hashing import Media
from mmrouter_sim.core.request import Sampler

_SPACES = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece write a leading space
_WORDS = 1024
_SEARCHED = 40_000  # ids; frequent words have low ones


class Vocabulary:
    """Token ids of answers: words after a space, and words that begin an answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words: list[int] = []
        self.openers: list[int] = []
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        plain: list[int] = []
        for number in range(min(tokenizer.get_vocab_size(), _SEARCHED)):
            token = tokenizer.id_to_token(number)
            if token is None or number in special:
                continue
            plain.append(number)
            if not token.isascii() and token.startswith(_SPACES) and _word(token[1:]) and token[1:].islower():
                self.words.append(number)
            elif _word(token) and token.istitle():
                self.openers.append(number)
            if len(self.words) >= _WORDS and self.openers:
                break
        # A vocabulary without such words, such as one of bytes, is used as it is.
        self.words = self.words or plain
        self.openers = self.openers[:_WORDS] or self.words
        if not self.words:
            raise ValueError("the tokenizer has no ordinary token to answer with")


def _word(text: str) -> bool:
    return text.isascii() and text.isalpha() and 3 <= len(text) <= 10


class AnswerGenerator:
    """Returns a sampler for each request."""

    def __init__(self, vocabulary: Vocabulary, stop_ids: Sequence[int], *, seed: int, mean_tokens: int) -> None:
        if mean_tokens < 1:
            raise ValueError("the mean length of an answer must be at least 1 token")
        self._vocabulary = vocabulary
        self._stop = stop_ids[0] if stop_ids else None
        self._seed = seed
        self._mean = mean_tokens

    def sampler(self, ids: "array[int]", media: Iterable[Media], *, min_tokens: int = 0, ends: bool = True) -> Sampler:
        """Return the answer to a prompt. ``ends=False``: it has no end of its own (``ignore_eos``)."""
        digest = hashlib.blake2b(ids.tobytes(), key=str(self._seed).encode(), digest_size=16)
        for item in media:
            digest.update(f"{item.identifier}@{item.offset}".encode())
        rng = random.Random(digest.digest())
        length = max(rng.randint(max(1, self._mean // 2), self._mean + self._mean // 2), min_tokens)
        tokens = [rng.choice(self._vocabulary.openers)]

        def sample(position: int) -> int:
            if ends and self._stop is not None and position >= length:
                return self._stop
            while len(tokens) <= position:
                tokens.append(rng.choice(self._vocabulary.words))
            return tokens[position]

        return sample
