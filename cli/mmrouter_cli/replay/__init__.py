"""`mmrouter replay`: a recorded event stream, explained block by block from the requests that caused it."""

from mmrouter_cli.replay.capture_reader import CaptureError, EngineName
from mmrouter_cli.replay.report import ReplayReport
from mmrouter_cli.replay.run import replay

__all__ = ["CaptureError", "EngineName", "ReplayReport", "replay"]
