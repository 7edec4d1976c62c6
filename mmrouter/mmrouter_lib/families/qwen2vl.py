"""Qwen2-VL: 14-pixel patches merged 2x2, so units of 28 pixels; 3136 to 12845056 pixels as published."""

from mmrouter_lib.families.qwen import load_qwen as load

__all__ = ["MODEL_TYPE", "load"]

MODEL_TYPE = "qwen2_vl"
