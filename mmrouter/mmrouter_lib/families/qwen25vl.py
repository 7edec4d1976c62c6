"""Qwen2.5-VL: the image processor of Qwen2-VL; windowed attention does not change the number of tokens."""

from mmrouter_lib.families.qwen import load_qwen as load

__all__ = ["MODEL_TYPE", "load"]

MODEL_TYPE = "qwen2_5_vl"
