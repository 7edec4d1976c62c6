"""Prompts of gpt-oss, in the Harmony format, as vLLM 0.32 builds them.

vLLM renders these chats by the library ``oss-harmony``, which brings its vocabulary, instead of the folder's template
and tokenizer. Here the library writes the same prompt with empty texts, and tiktoken tokenizes the texts by the
library's vocabulary: the library itself holds the interpreter's lock, and takes 2 s for a word of 32,768 letters. Both
are an optional dependency. The rules around them are those of vLLM's front end
(``tests/conformance/vllm/test_harmony.py``).
"""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar, Final, Self

from mmrouter_lib.families import Expanded, NotModelledError, PromptImage, TextOnly
from mmrouter_lib.prompt.harmony_turns import CHANNELS, Channel, Turn, instructions_of, turns_of
from mmrouter_lib.prompt.messages import normal_tools
from mmrouter_lib.prompt.segment_cache import MAX_WORD, NEW_TEXT, NewTextError, PromptTooLongError
from mmrouter_lib.prompt.templates import TemplateError
from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE: Final = "gpt_oss"
LIBRARY: Final = "oss-harmony"
"""OpenAI's own ``openai-harmony`` has a module of the same name, which fetches its vocabulary from the network."""
EFFORTS: Final = ("low", "medium", "high")
MIDNIGHT: Final = timedelta(minutes=1)
"""Before and after midnight the engine may write another day than the router: clocks differ, and requests wait."""
TOOLS_SIZE: Final = 1 << 19
"""Most characters of tools, which the library tokenizes itself, with the interpreter's lock, in 0.3 us each."""
TOOLS_WORK: Final = 1 << 26
"""Most of the sum of the squares of the bytes of words in tools: the library takes 2 ns for each, so 0.13 s."""
_TURN_SIZE = 64  # characters that a turn without text counts as
PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Where a text of the vocabulary o200k_base is cut before its tokens are merged."""
_PLACE = "\N{OBJECT REPLACEMENT CHARACTER}"  # of instructions
_WORD = re.compile(r"\S+|\s+")


class NoLibraryError(ImportError):
    """The libraries of the extra ``harmony`` are not installed."""


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class HarmonyPrompter:
    """Makes prompts by ``oss-harmony`` and tiktoken. Immutable and safe to share between threads.

    ``codec``: the folder's tokenizer, which makes the prompts of completions. ``made`` and ``texts``: the library's
    encoding, and tiktoken's. ``special``: ids of the format's own tokens by name. ``turns``: by author and channel,
    what the library writes of a turn without its texts, where no name is in it. ``day``: the one that the engines write
    into each chat; by default that of ``now``.
    """

    first_release: ClassVar[tuple[int, ...]] = ()

    family: TextOnly
    codec: TokenizerCodec
    made: Any
    texts: Any
    special: Mapping[str, int]
    turns: Mapping[tuple[str, Channel | None], Sequence[int]]
    day: str | None = None
    now: Callable[[], datetime] = utc_now

    @classmethod
    def load(cls, family: TextOnly, codec: TokenizerCodec, day: str | None = None) -> Self:
        """Load the library's vocabulary, once in a process: 1 s of CPU and 130 MB. Raises :class:`NoLibraryError`."""
        try:
            version(LIBRARY)
            made, texts = _encodings()
        except ImportError as error:
            raise NoLibraryError(f"{LIBRARY} and tiktoken are not installed: {error}") from error
        names = ("start", "channel", "message")
        special = {name: made.encode(f"<|{name}|>", allowed_special="all")[0] for name in names}
        known = [Turn("user", ()), *(Turn("assistant", (), channel) for channel in CHANNELS)]
        turns = {(turn.author, turn.channel): tuple(made.render(_message(turn))) for turn in known}
        return cls(family, codec, made, texts, special, turns, day)

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the prompt of a chat request's body.

        Raises :class:`TemplateError` for what the engine answers with 400, also with the library's own refusal,
        :class:`NotModelledError`, also in the minutes around midnight, :class:`PromptTooLongError` and
        :class:`NewTextError`.
        """
        if images:
            raise NotModelledError("gpt-oss takes no images", f"family:{self.family.name}")
        effort = body.get("reasoning_effort")
        if effort is not None and effort not in EFFORTS:
            raise TemplateError(f"reasoning_effort {effort!r} is not supported by the Harmony format")
        if body.get("continue_final_message") and body.get("add_generation_prompt"):
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be true")
        instructions, messages = instructions_of(body["messages"])
        turns = turns_of(messages)
        tools = None if body.get("tools") is None else normal_tools(body["tools"])
        _check_size([instructions or "", *(text for turn in turns for text in _texts(turn))], len(turns), tools)
        first = Turn("developer", () if instructions is None else (instructions,)) if instructions or tools else None
        day = self._today()
        try:
            return Expanded(ids=self._ids(first, turns, tools, effort, day), spans=())
        except Exception as error:
            # vLLM answers everything that the library raises with 400 and the reason.
            raise TemplateError(f"the Harmony format refuses the messages: {error}") from error

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """Return the prompt of a completion: of a text, or of token ids, which stay as they are.

        Engines tokenize it by the folder's tokenizer. Raises what :meth:`TokenizerCodec.encode` raises.
        """
        if not isinstance(prompt, str):
            return Expanded(ids=prompt, spans=())
        return Expanded(ids=self.codec.encode(prompt, add_special_tokens=add_special_tokens), spans=())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return str(self.made.decode(list(ids)))

    def _today(self) -> str:
        """Return the day that engines write. Raises :class:`NotModelledError` where it is not sure.

        Pods have UTC, and engines on this machine its time zone, so both must have the same day.
        """
        if self.day is not None:
            return self.day
        now = self.now()
        moments = (now - MIDNIGHT, now + MIDNIGHT)
        days = {moment.astimezone(zone).date() for moment in moments for zone in (UTC, None)}
        if len(days) > 1:
            text = "the day in the prompt is about to change, or depends on the time zone"
            raise NotModelledError(text, "day:messages")
        return days.pop().isoformat()

    def _ids(
        self,
        first: Turn | None,
        turns: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]] | None,
        effort: str | None,
        day: str,
    ) -> "array[int]":
        """Return the ids of a prompt. The turn ``first`` has the tools."""
        from openai_harmony import Conversation, Message, ReasoningEffort, Role, SystemContent  # noqa: PLC0415
        from openai_harmony import RenderConversationConfig as Config  # noqa: PLC0415

        system = SystemContent.new().with_conversation_start_date(day)
        if effort is not None:
            system = system.with_reasoning_effort(ReasoningEffort[effort.upper()])
        messages = [Message.from_role_and_content(Role.SYSTEM, system)]
        messages += [] if first is None else [_message(first, tools)]
        chat = Conversation.from_messages(messages)
        written = self.made.render_conversation_for_completion(chat, Role.ASSISTANT, Config(auto_drop_analysis=False))
        starts = [at for at, number in enumerate(written) if number == self.special["start"]]
        ids = array("I", written[: starts[1]])
        if first is not None:
            self._add(ids, first, written[starts[1] : starts[-1]])
        for turn in turns:
            known = self.turns.get((turn.author, turn.channel)) if turn.calls is None else None
            self._add(ids, turn, known or self.made.render(_message(turn)))
        ids.extend(written[starts[-1] :])
        return ids

    def _add(self, ids: "array[int]", turn: Turn, written: Sequence[int]) -> None:
        """Add a turn: what the library has ``written`` of it, with its texts."""
        head, tail = written[: written.index(self.special["message"]) + 1], written[-1:]
        texts = turn.texts
        if turn.author == "developer":
            text = self.made.decode(written[len(head) : -1])
            texts = (text.replace(_PLACE, turn.texts[0], 1) if turn.texts else text,)
        elif turn.calls is not None:
            head = self._call_head(turn.calls)
        ids.extend(head)
        for text in texts:
            ids.extend(self.texts.encode_ordinary(text))
        ids.extend(tail)

    def _call_head(self, function: str) -> list[int]:
        """Return how vLLM writes the head of a call: the library puts the function's name behind the channel."""
        start, channel, message = (self.special[name] for name in ("start", "channel", "message"))
        author, kind = self.made.encode(f"assistant to=functions.{function}"), self.made.encode("commentary json")
        return [start, *author, channel, *kind, message]


def _message(turn: Turn, tools: Sequence[Mapping[str, Any]] | None = None) -> Any:
    """Return the library's message of a turn, without its texts; instructions are :data:`_PLACE`."""
    from openai_harmony import Author, DeveloperContent, Message, Role, ToolDescription  # noqa: PLC0415

    if turn.author == "developer":
        content = DeveloperContent.new()
        if turn.texts:
            content = content.with_instructions(_PLACE)
        if tools:
            functions = [tool["function"] for tool in tools]
            shown = [(each["name"], each["description"] or "", each["parameters"]) for each in functions]
            content = content.with_function_tools([ToolDescription.new(*each) for each in shown])
        return Message.from_role_and_content(Role.DEVELOPER, content)
    is_result = turn.author.startswith("functions.")
    author = Author(role=Role.TOOL, name=turn.author) if is_result else Author(role=Role(turn.author))
    message = Message.from_author_and_content(author, "")
    if turn.channel is not None:
        message = message.with_channel(turn.channel)
    if is_result:
        return message.with_recipient("assistant")
    if turn.calls is not None:
        return message.with_recipient(f"functions.{turn.calls}").with_content_type("json")
    return message


@cache
def _encodings() -> tuple[Any, Any]:
    """Return the library's encoding, and tiktoken's of the same vocabulary. Raises ``ImportError``."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding  # noqa: PLC0415
    from tiktoken import Encoding  # noqa: PLC0415

    made = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    return made, Encoding("o200k_base", pat_str=PATTERN, mergeable_ranks=_ranks(made), special_tokens={})


def _ranks(made: Any) -> dict[bytes, int]:
    """Return the library's vocabulary, without the format's own tokens, which come after all others."""
    ranks: dict[bytes, int] = {}
    while not made.is_special_token(len(ranks)):
        text = made.decode([len(ranks)], errors="surrogateescape")
        ranks[text.encode("utf-8", "surrogateescape")] = len(ranks)
    return ranks


def _texts(turn: Turn) -> Iterator[str]:
    yield from turn.texts
    yield turn.author
    yield turn.calls or ""


def _check_size(texts: Sequence[str], turns: int, tools: Any) -> None:
    """Bound the work of a prompt, whose texts are tokenized as a whole.

    Raises :class:`NewTextError` for more characters than :data:`NEW_TEXT`, :class:`PromptTooLongError` for a word, or a
    run of blanks, of more than :data:`MAX_WORD`, and for tools above :data:`TOOLS_SIZE` or :data:`TOOLS_WORK`,
    :class:`TemplateError` for half of a surrogate pair, which the engine refuses.
    """
    shown = "" if tools is None else json.dumps(tools, ensure_ascii=False)
    if sum(map(len, texts)) + len(shown) + _TURN_SIZE * turns > NEW_TEXT.get():
        raise NewTextError
    try:
        words = (len(word.encode()) for word in _WORD.findall(shown))
        if len(shown) > TOOLS_SIZE or sum(size * size for size in words) > TOOLS_WORK:
            raise PromptTooLongError(f"the tools have {len(shown)} characters, or long words")
        for text in texts:
            if not text.isascii():
                text.encode()
    except UnicodeEncodeError as error:
        raise TemplateError("the prompt holds half of a surrogate pair, which is no character") from error
    longest = max((len(word[0]) for text in texts for word in _WORD.finditer(text)), default=0)
    if longest > MAX_WORD:
        raise PromptTooLongError(f"a word of the text has {longest} characters and cannot be cut")
