"""Models without a family here: their texts are predicted where the engine makes a prompt of template and tokenizer.

vLLM processes a request without media as text, whatever else the model takes; of SGLang this is known of models that
take text only, and of Mistral 3 with Mistral's tokenizer. Models that an engine prompts by code of its own are not
predicted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.sglang.families.pixtral import SglangPixtral
from mmrouter_lib.engines.sglang.prompts.mistral import MODEL_TYPES as MISTRAL_TYPES
from mmrouter_lib.engines.sglang.prompts.mistral import SglangMistralPrompter
from mmrouter_lib.engines.sglang.prompts.prompter import as_sglang_loads
from mmrouter_lib.families import ProcessorLimits, TextOnly
from mmrouter_lib.families.pixtral import read_geometry
from mmrouter_lib.model_folder import (
    BYTE_PAIRS_CLASS,
    MISTRAL_WEIGHTS,
    find_json,
    has_byte_pairs,
    has_tokenizer_code,
    read_json,
)
from mmrouter_lib.prompt import AnyPrompter, HarmonyPrompter, MistralPrompter, Prompter, harmony, mistral
from mmrouter_lib.prompt.templates import Templates, find_templates
from mmrouter_lib.prompt.tokenizer import TokenizerCodec, load_tokenizer, special_tokens
from mmrouter_lib.prompt.tokenizer_class import AS_FILE, TokenizerClassError, as_class, declared_class, tokenizer_class
from mmrouter_lib.prompt.vocabularies import byte_pairs, sentencepiece
from mmrouter_lib.tokenizer_code import read_tokenizer_code

OWN_PROMPTS: Final[Mapping[EngineType, re.Pattern[str]]] = {
    "vllm": re.compile(
        r"(?:DeepseekV32|DeepseekV41|MoonshotKimia)ForCausalLM|KimiK3ForConditionalGeneration"
        r"|(?:DeepseekV4|Inkling)For(?:CausalLM|ConditionalGeneration)"
    ),
    "sglang": re.compile(
        r"deepseek_v41|.*(?:DeepseekV4|KimiK3).*|InklingForConditionalGeneration|GlmMoeDsaForCausalLM"
        r"|Glm5NextForConditionalGeneration|minimax_m3_vl"
    ),
}
"""``model_type``s and architectures whose chats vLLM 0.32 and SGLang 0.5.23 render by code instead of a template.

vLLM renders gpt-oss by code, too, which :mod:`mmrouter_lib.prompt.harmony` models.
"""

_MEDIA = re.compile(r"vision|visual|image|img|video|audio|speech|thinker|mm_")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_DAY = "VLLM_SYSTEM_START_DATE"
_PLAIN_VALUES: Mapping[str, tuple[str, ...]] = {
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS": ("", "0"),
    "TZ": ("", "UTC", "Etc/UTC"),
}
"""Variables of vLLM that change the prompts of gpt-oss -> the values with which they are modelled."""
_MISTRAL_FILES: Mapping[EngineType, tuple[str, ...]] = {
    "vllm": (mistral.FILE, "tokenizer.model.v*"),
    "sglang": (mistral.FILE,),
}
"""Engine -> files of Mistral's own tokenizers that it may take before others."""


class UnpredictedError(ValueError):
    """The prompts of a model are not predicted; the message is the decisions' reason, ``cause:subject``."""


def load_text_prompter(
    engine: EngineType,
    folder: Path,
    chat_template: str | None = None,
    variables: Sequence[Mapping[str, str | None]] = (),
    processor: ProcessorLimits | None = None,
) -> AnyPrompter:
    """Return the prompter of a model folder without a family; ``chat_template`` (a text) replaces its template.

    With Mistral's own tokenizer and for gpt-oss vLLM uses no template, so ``chat_template`` has no effect. Beside that
    tokenizer SGLang finds in the given template the form in which to pass contents; this is not modelled and raises
    :class:`UnpredictedError`. ``processor``: the resource's processor options.
    ``variables``: the environment of each pool's engines as far as it is known, ``None`` for a value that is not.

    Raises :class:`UnpredictedError`, and :class:`~mmrouter_lib.model_folder.ModelFolderError` for files that cannot be
    read.
    """
    config = read_json(folder, "config.json")
    model_type = str(config.get("model_type", "unknown"))
    names = [model_type, *(config.get("architectures") or ())]
    own = next((name for name in names if OWN_PROMPTS[engine].fullmatch(str(name))), None)
    if own is not None:
        raise UnpredictedError(f"engine_prompts:{own}")
    plain, described = takes_text_only(folder, config), _tokenizer_config(folder)
    in_sglangs_mistral = engine == "sglang" and _sglang_takes_tekken(folder, model_type, described)
    images_known = engine == "vllm" or (in_sglangs_mistral and model_type == "mistral3")
    if config.get("is_encoder_decoder") or not (plain or images_known):
        raise UnpredictedError(f"family:{model_type}")
    if in_sglangs_mistral and chat_template is None:
        return _load_sglangs_mistral(folder, config, processor, plain=plain)
    for pattern in _MISTRAL_FILES[engine]:
        if files := sorted(file.name for file in folder.glob(pattern)):
            if engine == "vllm" and files[0] == mistral.FILE and next(folder.glob(MISTRAL_WEIGHTS), None) is not None:
                return _load_mistral(folder, model_type)
            raise UnpredictedError(f"tokenizer:{files[0]}")
    if has_tokenizer_code(described):
        if read_tokenizer_code(folder, described) is None:
            raise UnpredictedError("tokenizer:remote_code")
        loaded = PROMPTERS[engine].load(folder, chat_template=chat_template, family=TextOnly(model_type))
        return _with_tokenizers_template(loaded, plain=plain)
    has_file, in_pairs = (folder / "tokenizer.json").is_file(), has_byte_pairs(folder)
    in_pieces = not has_file and (folder / sentencepiece.FILE).is_file()
    if not (has_file or in_pairs or in_pieces):
        raise UnpredictedError(f"tokenizer:{_other_vocabulary(folder)}")
    try:
        declared = described.get("tokenizer_class") or config.get("tokenizer_class")
        name = tokenizer_class(model_type, declared)
        if in_pairs and (name == BYTE_PAIRS_CLASS or not in_pieces):
            tokenizer, described = byte_pairs.load_byte_pairs(folder, described, name)
        elif in_pieces:
            tokenizer, described = sentencepiece.load_sentencepiece(folder, described, name)
        else:
            tokenizer = load_tokenizer(folder, described)
        if engine == "sglang":
            name = declared_class(declared) if name == AS_FILE and declared is not None else name
            tokenizer = as_sglang_loads(tokenizer, name, described)
        else:
            tokenizer = as_class(tokenizer, name, described)
    except TokenizerClassError as error:
        raise UnpredictedError(f"tokenizer:{error}") from error
    except sentencepiece.NoSentencePieceError as error:
        raise UnpredictedError(f"tokenizer:{sentencepiece.FILE}") from error
    family = TextOnly(model_type)
    if engine == "vllm" and model_type == harmony.MODEL_TYPE:
        return _load_harmony(family, TokenizerCodec.of(tokenizer, described), variables)
    loaded = PROMPTERS[engine].load(folder, chat_template=chat_template, family=family, tokenizer=tokenizer)
    named = replace(loaded, variables=special_tokens(described), codec=TokenizerCodec.of(tokenizer, described))
    return _with_tokenizers_template(named, plain=plain)


def _load_mistral(folder: Path, name: str) -> MistralPrompter:
    try:
        return MistralPrompter.load(folder, name)
    except mistral.NoLibraryError as error:
        raise UnpredictedError(f"tokenizer:{mistral.FILE}") from error


def _sglang_takes_tekken(folder: Path, model_type: str, described: dict[str, Any]) -> bool:
    """Whether SGLang takes tekken.json: for Mistral's types always, for others without a tokenizer.json."""
    is_alone = not (folder / "tokenizer.json").is_file()
    is_own = model_type in MISTRAL_TYPES and not has_tokenizer_code(described)
    return (folder / mistral.FILE).is_file() and (is_alone or is_own)


def _load_sglangs_mistral(
    folder: Path, config: dict[str, Any], processor: ProcessorLimits | None, *, plain: bool
) -> SglangMistralPrompter:
    family: TextOnly | SglangPixtral = TextOnly(str(config.get("model_type", "unknown")))
    source = None
    if not plain:
        family = SglangPixtral.of(read_geometry(folder, config, processor))
        source = find_templates(folder, None, {}).processor
    try:
        return SglangMistralPrompter.load(folder, family, source)
    except mistral.NoLibraryError as error:
        raise UnpredictedError(f"tokenizer:{mistral.FILE}") from error


def _load_harmony(
    family: TextOnly, codec: TokenizerCodec, variables: Sequence[Mapping[str, str | None]]
) -> HarmonyPrompter:
    for pool in variables:
        for name, values in _PLAIN_VALUES.items():
            if pool.get(name, "") not in values:
                raise UnpredictedError(f"engine_prompts:{name}")
    days = {pool.get(_DAY, "") for pool in variables} or {""}
    if len(days) > 1 or None in days:
        raise UnpredictedError(f"engine_prompts:{_DAY}")
    try:
        return HarmonyPrompter.load(family, codec, days.pop() or None)
    except harmony.NoLibraryError as error:
        raise UnpredictedError(f"engine_prompts:{harmony.MODEL_TYPE}") from error


def takes_text_only(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether neither config.json nor a processor's file tells of images, videos or audio."""
    return not (any(_MEDIA.search(key) for key in config) or any((folder / name).exists() for name in _PROCESSORS))


def _with_tokenizers_template(loaded: Prompter, *, plain: bool) -> Prompter:
    """A model without a processor has the tokenizer's template only; of another one both must be the same."""
    own, processors = loaded.templates.tokenizer, loaded.templates.processor
    if processors is None or own.get("default") == processors:
        return loaded
    if not plain:
        raise UnpredictedError(f"family:{loaded.family.name}")
    return replace(loaded, templates=Templates(processor=None, tokenizer=own))


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with the named tokens that older folders have in a file of their own."""
    config = find_json(folder, "tokenizer_config.json") or {}
    if "added_tokens_decoder" in config:
        return config
    return config | (find_json(folder, "special_tokens_map.json") or {})


def _other_vocabulary(folder: Path) -> str:
    names = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
    return next((name for name in names if (folder / name).is_file()), "missing")
