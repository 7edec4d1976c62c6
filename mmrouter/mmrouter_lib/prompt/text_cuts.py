"""Where a text can be cut so that the token ids of its pieces are the ids of the whole text.

A text may be cut behind a token at which the tokenizer always splits first, and behind some words. It is cut only if
the tokenizer's own parts guarantee the ids. For tokens (:func:`cut_tokens`):

- Added tokens that are not normalized are matched in the raw text before any other step, leftmost and longest first. A
  *cut token* never shares a character with another occurrence of an added token: none contains another, and none ends
  as another begins. So every occurrence is matched, independent of its neighbours.
- It strips no blanks (``lstrip``, ``rstrip``), has none at its ends that a neighbour could strip, and no added token
  depends on its neighbours (``single_word``).
- The text between is normalized, split and merged piece by piece. Parts that look further are not on the lists below:
  ``Metaspace`` with a special first piece, a random model (``dropout``), anything unknown.
- A post-processor only adds the same ids around the whole.

For words (:func:`word_ends`): no added token holds the two characters at a cut or strips what is behind it, and either

- every word is merged on its own, and words are found by one of the patterns :data:`_WORDS`. None of them matches a
  blank behind a character that is none, or punctuation or a line end behind a letter or digit. None looks back, and
  none looks ahead but behind blanks. The apostrophe, which begins a word's ending (``'s``), is no place for a cut. NFC
  composes nothing across a cut; or
- the whole text is merged, with ``▁`` for every blank, and no token of the vocabulary holds the character at the cut
  followed by ``▁``. Merges lead to such tokens only, so those left and right of the cut do not depend on each other.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, models

WINDOW: Final = 1 << 16  # characters
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"})

_AROUND_LETTERS: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
_APART_FROM_HAN: Final = "|".join(
    rf"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").split("|")
)
_WORDS: Final = frozenset(
    {
        (rf"{_ENDINGS}|\p{{N}}{_AROUND_LETTERS}",),  # Qwen2
        (rf"{_ENDINGS}|\p{{N}}{{1,3}}{_AROUND_LETTERS}",),  # Llama 3
        (rf"{_CASED}|\p{{N}}{_AROUND_LETTERS}".replace(r"[\r\n]*", r"[\r\n/]*"),),  # Mistral's Tekken
        (rf"[\p{{Han}}]+|{_APART_FROM_HAN}|\p{{N}}{{1,3}}{_AROUND_LETTERS}",),  # Kimi
        (  # DeepSeek-V3
            r"\p{N}{1,3}",
            "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
            (
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
        ),
    }
)
"""Regular expressions that split a text into words, one after the other. With ``use_regex``, ``ByteLevel`` has one
more, GPT-2's."""

_LETTERS: Final = "0-9A-Za-z一-龥ぁ-ゔァ-ヴ가-힣"
"""Letters and digits in every version of Unicode, of which NFC composes none with what may be behind a cut."""
_PUNCTUATION: Final = (
    string.punctuation.replace("'", "") + "\n\N{IDEOGRAPHIC COMMA}\N{IDEOGRAPHIC FULL STOP}\uff0c\uff1b"
)
_BYTE_AND_BLANK: Final = re.compile("<0x[0-9A-F]{2}>▁")  # a letter may be written as bytes


class WordEnds(NamedTuple):
    """Ends of words behind which a text can be cut."""

    pattern: "re.Pattern[str]"
    """Matches up to the end of a word."""
    dropped: int
    """Characters behind it that are left out, because the tokenizer puts a blank in front of every piece."""

    def pieces(self, text: str, size: int, reach: int) -> Iterator[str]:
        """Cut a text behind the first end of a word that is ``size`` to ``size + reach`` characters on, and so forth.

        Where there is none, the rest of the text is one piece.
        """
        start = 0
        while len(text) - start > size:
            match = self.pattern.search(text, start + size, start + size + reach)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end() + self.dropped
        yield text[start:]


def occurrences(tokens: "re.Pattern[str]", text: str, longest: int, window: int = WINDOW) -> Iterator[int]:
    """Return where each occurrence of cut tokens of at most ``longest`` characters ends, in their order.

    One call scans ``window`` characters: Python changes threads between calls only, and four million of the beginnings
    of tokens take 45 ms.
    """
    at = 0
    while at < len(text):
        end = at + window
        for match in tokens.finditer(text, at, end + longest):
            at = match.end()
            yield at
        at = max(at, end)


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the tokens behind which a text can be cut, none where the tokenizer gives no guarantee."""
    added = _added_tokens(tokenizer)
    if (
        not _is_plain(tokenizer, added)
        or not _is_local(settings_of(tokenizer.normalizer), "normalizers", _NORMALIZERS)
        or not _is_local(settings_of(tokenizer.pre_tokenizer), "pretokenizers", _PRE_TOKENIZERS)
    ):
        return []
    sharing = texts_that_can_share({token.content for token in added})
    return [
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.rstrip)
        and token.content == token.content.strip()
        and token.content not in sharing
    ]


def word_ends(tokenizer: Tokenizer) -> WordEnds | None:
    """Return where the text between cut tokens can be cut, ``None`` where the tokenizer gives no guarantee."""
    added = _added_tokens(tokenizer)
    strips = {token.content[-1] for token in added if token.rstrip}
    if not _is_plain(tokenizer, added) or any(map(str.isalnum, strips)):
        return None
    contents = {token.content for token in added}
    if tokenizer.normalizer is not None:
        contents |= {tokenizer.normalizer.normalize_str(content) for content in contents}
    pairs = {pair for content in contents for pair in pairwise(content)}
    never = strips | {before for before, after in pairs if after == " "}
    if _finds_words(tokenizer):
        if not all(map(str.isascii, never)):  # NFC composes them of several characters, of which the last one differs
            return None
        punctuation = set(_PUNCTUATION) - {after for before, after in pairs if before.isalnum()}
        letter = f"[{_LETTERS}](?=[{_escaped(punctuation)}])"
        return WordEnds(re.compile(rf"[^\s{_escaped(never)}](?= )|{letter}"), dropped=0)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    dropped = _merges_whole_text(tokenizer)
    if dropped is None or "▁" not in vocabulary or any(map(_BYTE_AND_BLANK.search, vocabulary)):
        return None
    pairs |= {pair for token in vocabulary if "▁" in token for pair in pairwise(token)}
    never |= {before for before, after in pairs if after == "▁"} | {"▁"}
    if not dropped:
        return WordEnds(re.compile(rf"[^\s{_escaped(never)}](?= )"), dropped)
    # Behind an added token the tokenizer puts one more blank, and none in front of one.
    never |= {content[-1] for content in contents}
    first = {content[0] for content in contents}
    return WordEnds(re.compile(rf"[^\s{_escaped(never)}](?= [^\s{_escaped(first)}])"), dropped)


def _escaped(characters: Iterable[str]) -> str:
    """Return characters as a class of a regular expression has them."""
    return "".join(map(re.escape, sorted(characters)))


def _added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    return [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]


def _is_plain(tokenizer: Tokenizer, added: Iterable[AddedToken]) -> bool:
    """Whether a tokenizer merges every text in the same way, and no added token depends on the characters around it."""
    return (
        not tokenizer.encode_special_tokens  # then special tokens are plain text
        and tokenizer.truncation is None
        and tokenizer.padding is None
        and isinstance(tokenizer.model, models.BPE)
        and tokenizer.model.dropout is None
        and not any(token.single_word for token in added)
    )


def _finds_words(tokenizer: Tokenizer) -> bool:
    """Whether words are found by a known pattern, in a text that is as it was or composed by NFC."""
    *before, last = _parts(settings_of(tokenizer.pre_tokenizer), "pretokenizers") or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if any(part["type"] != "NFC" for part in _parts(settings_of(tokenizer.normalizer), "normalizers")):
        return False
    if not before:
        return bool(last["use_regex"])
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    patterns = tuple(part.pop("pattern", {}).get("Regex") for part in before)
    return patterns in _WORDS and all(part == split for part in before) and not last["use_regex"]


def _merges_whole_text(tokenizer: Tokenizer) -> int | None:
    """Return how many blanks a piece of a text that is merged as a whole begins without, ``None`` for another one."""
    model = tokenizer.model
    assert isinstance(model, models.BPE)
    if model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return None
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepended = {"type": "Prepend", "prepend": "▁"}
    normalizer = _parts(settings_of(tokenizer.normalizer), "normalizers")
    pre_tokenizer = settings_of(tokenizer.pre_tokenizer)
    if normalizer == [prepended, replaced] and not pre_tokenizer:
        dropped = 1
    elif normalizer == [replaced] and (not pre_tokenizer or pre_tokenizer.get("pattern") == {"String": " "}):
        dropped = 0  # no blank is left at which the text could be split
    elif not normalizer and pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer["replacement"] == "▁":
        dropped = 0  # it puts no blank in front of one
    else:
        return None
    return dropped


def texts_that_can_share(texts: set[str]) -> set[str]:
    """Return those of some texts of which an occurrence can share a character with another occurrence of any of them.

    By sets of beginnings and ends, because a vocabulary may have thousands of such texts.
    """
    beginnings = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    ends = {text[-length:] for text in texts for length in range(1, len(text) + 1)}
    sharing: set[str] = set()
    for text in texts:
        size = len(text)
        inside = {text[at:end] for at in range(size) for end in range(at + 1, size + 1) if end - at < size} & texts
        overlaps = any(text[:length] in ends or text[-length:] in beginnings for length in range(1, size))
        if inside or overlaps:
            sharing |= inside | {text}
    return sharing


def _is_local(settings: dict[str, Any], inner: str, local: frozenset[str]) -> bool:
    """Whether a normalizer or pre-tokenizer handles each piece independently."""
    match settings.get("type"):
        case None:
            return True
        case "Sequence":
            return all(_is_local(part, inner, local) for part in settings[inner])
        case "Metaspace":
            return settings.get("prepend_scheme") in ("always", "never")
        case name:
            return name in local


def _parts(settings: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, in their order."""
    parts: list[dict[str, Any]] = settings.get(inner, [settings] if settings else [])
    return parts


def settings_of(part: Any) -> dict[str, Any]:
    """Return the settings of a part of a tokenizer, as in tokenizer.json; empty for a missing part."""
    if part is None:
        return {}
    settings: dict[str, Any] = json.loads(part.__getstate__())
    return settings
