"""How SGLang makes the prompt of a chat (docs/engine-facts/sglang.md#prompts)."""
