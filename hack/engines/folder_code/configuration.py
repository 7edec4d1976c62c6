"""The configuration of the stand-in for Nemotron Nano VL, whose class neither vLLM nor transformers has."""

from typing import Any

from transformers import NemotronHConfig, PretrainedConfig


class Config(PretrainedConfig):
    model_type = "NemotronH_Nano_VL_V2"

    def __init__(
        self, llm_config: dict[str, Any] | None = None, vision_config: dict[str, Any] | None = None, **others: Any
    ) -> None:
        self.llm_config = NemotronHConfig(**llm_config or {})
        self.vision_config = PretrainedConfig(**vision_config or {})
        super().__init__(**others)
