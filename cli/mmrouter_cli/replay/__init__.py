"""`mmrouter replay`: a recorded event stream, explained block by block from the requests that caused it."""

from pathlib import Path

from mmrouter_cli.replay.capture import CaptureError, EngineName, ReplayReport, read

__all__ = ["CaptureError", "EngineName", "ReplayReport", "replay"]


def replay(path: Path, *, model_dir: Path | None = None, engine: EngineName | None = None) -> ReplayReport:
    """Explain every block of a recorded event stream.

    With ``model_dir`` the prompts are rendered, tokenized and expanded by the library and must equal the ids that the
    engine returned; without it those ids are taken as they are. Raises :class:`CaptureError` for a file that cannot be
    read or is a capture of another engine than ``engine``, a model folder that cannot be used, or a capture in which
    nothing can be compared.
    """
    capture = read(path, engine)
    if capture.engine == "sglang":
        from mmrouter_cli.replay import check_sglang_capture

        report = check_sglang_capture.explain(capture, model_dir)
    else:
        from mmrouter_cli.replay import check_vllm_capture

        report = check_vllm_capture.explain(capture, model_dir)
    if not report.blocks and not report.differences:
        why = "; ".join(report.skipped) or "it holds no block that was stored"
        raise CaptureError(f"{path}: nothing can be compared: {why}")
    return report
