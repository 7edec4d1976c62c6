"""Find the chat template that an engine uses for a model folder.

vLLM 0.32 takes the processor's template before the tokenizer's, and only the tokenizer's when the request has tools;
each has its own order of files (transformers 5.19).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrouter_lib.model_folder import ModelFolderError, find_json, find_text
from mmrouter_lib.prompt.messages import TemplateError

NAMED_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Templates:
    """The template texts of a folder. ``tokenizer`` maps names to texts; a single template is named ``default``."""

    processor: str | None
    tokenizer: dict[str, str]

    def choose(self, *, tools: bool) -> str:
        """Return the template for a request with or without tools. Raises :class:`TemplateError` without one."""
        if self.processor is not None and not tools:
            return self.processor
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.tokenizer:
                return self.tokenizer[name]
        raise TemplateError(f"the model has no chat template for a request {'with' if tools else 'without'} tools")

    def texts(self) -> set[str]:
        """Return every template that :meth:`choose` can return."""
        texts = {text for name, text in self.tokenizer.items() if name in ("default", "tool_use")}
        return texts if self.processor is None else texts | {self.processor}


def find_templates(folder: Path, explicit: str | None, tokenizer_config: dict[str, Any]) -> Templates:
    """Return the templates of a folder; ``explicit``, a text or the name of one of them, replaces them all.

    Raises :class:`ModelFolderError` for files that contradict each other or hold no template.
    """
    tokenizer = _tokenizer_templates(folder, tokenizer_config)
    if explicit is not None:
        return Templates(processor=None, tokenizer={"default": tokenizer.get(explicit, explicit)})
    if (folder / NAMED_TEMPLATES).is_dir():
        raise ModelFolderError(f"{folder / NAMED_TEMPLATES}: named template files need spec.engine.chatTemplate")
    return Templates(processor=_processor_template(folder), tokenizer=tokenizer)


def _processor_template(folder: Path) -> str | None:
    """processor_config.json, then the older chat_template.json, then chat_template.jinja."""
    inside = (find_json(folder, "processor_config.json") or {}).get("chat_template")
    if inside is None:
        legacy = find_json(folder, "chat_template.json")
        if legacy is None:
            return find_text(folder, "chat_template.jinja")
        inside = legacy.get("chat_template")
    if not isinstance(inside, str):
        raise ModelFolderError(f"{folder}: the processor's chat_template must be a text, not {type(inside).__name__}")
    return inside


def _tokenizer_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja, then tokenizer_config.json, where it is a text or a list of named texts."""
    alone = find_text(folder, "chat_template.jinja")
    if alone is not None:
        return {"default": alone}
    value = config.get("chat_template")
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case dict():
            named = value
        case list() if all(isinstance(entry, dict) for entry in value):
            named = {entry.get("name"): entry.get("template") for entry in value}
        case _:
            named = {"": None}
    if not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: chat_template holds no named texts")
    return named
