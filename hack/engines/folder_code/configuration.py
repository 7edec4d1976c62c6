"""The configuration of the stand-ins for InternVL and Nemotron, whose classes neither vLLM nor transformers has."""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig


class Config(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(
        self,
        llm_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        sound_config: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        text = llm_config or {"model_type": "qwen2"}
        self.llm_config = CONFIG_MAPPING[text["model_type"]](**text)
        self.vision_config = PretrainedConfig(**vision_config or {})
        self.sound_config = PretrainedConfig(**sound_config) if sound_config else None
        super().__init__(**others)
