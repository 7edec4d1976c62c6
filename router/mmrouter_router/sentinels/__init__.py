"""SGLang's sentinels of images: predicted from the encoded bytes where that is exact, else learned.

SGLang overwrites an image's placeholder tokens by values of its own (docs/engine-facts/sglang.md#sentinels). The router
writes them into its copy of the prompt, so that its keys equal the engine's blocks. All state is kept per *scope*,
engine version and pool, because the values depend on both.
"""
