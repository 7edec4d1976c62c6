"""Qwen3-VL: 16-pixel patches merged 2x2, so units of 32 pixels; 65536 to 16777216 pixels as published."""

from mmrouter_lib.families.qwen import load_qwen as load

__all__ = ["MODEL_TYPE", "load"]

MODEL_TYPE = "qwen3_vl"
