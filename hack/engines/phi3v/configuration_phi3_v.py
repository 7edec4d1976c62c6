"""Stands in for the configuration class that Phi-3-vision's repository brings as remote code: tests only.

transformers 5 has no such class, and the published one is code of others, which this project neither runs nor copies.
The base class keeps every field of ``config.json``; these are the ones that vLLM reads and that may be absent there.
"""

from typing import Any

from transformers import PretrainedConfig


class Phi3VConfig(PretrainedConfig):
    model_type = "phi3_v"

    def __init__(
        self,
        sliding_window: int | None = None,
        rope_theta: float = 10_000.0,
        rope_scaling: dict[str, Any] | None = None,
        original_max_position_embeddings: int = 4096,
        rms_norm_eps: float = 1e-5,
        **fields: Any,
    ) -> None:
        self.sliding_window = sliding_window
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.original_max_position_embeddings = original_max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"):
            setattr(self, name, fields.pop(name, None))
        for name in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            setattr(self, name, fields.pop(name, None))
        self.img_processor = fields.pop("img_processor", {})
        self.embd_layer = fields.pop("embd_layer", {})
        super().__init__(**fields)
