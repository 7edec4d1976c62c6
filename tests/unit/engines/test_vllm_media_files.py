"""What vLLM says of files, and what it says of other things (its own sentences,
docs/engine-facts/vllm.md#image-uuid)."""

from pathlib import Path

import pytest

from mmrouter_lib.engines.vllm.media_files import file_url, is_file_refused


@pytest.mark.parametrize(
    ("status", "said", "about_a_file"),
    [
        (500, "[Errno 2] No such file or directory: '<path>'", True),
        (500, "[Errno 13] Permission denied: '<path>'", True),
        (500, "Cannot load local files without `--allowed-local-media-path`.", True),
        (400, "The file path <path> must be a subpath of `--allowed-local-media-path <path>`.", True),
        (400, "Failed to load image: cannot identify image file <_io.BytesIO object>", False),
        (500, "cannot schedule new futures after shutdown", False),
        (503, "[Errno 2] No such file or directory: '<path>'", False),
    ],
)
def test_errors_about_files_are_told_from_others(status, said, about_a_file):
    assert is_file_refused(status, f'{{"error": {{"message": "{said}"}}}}'.encode()) is about_a_file


def test_a_path_is_written_so_that_an_engine_finds_it():
    assert file_url(Path("/a b/c%d.png")) == "file:///a%20b/c%25d.png"
    with pytest.raises(ValueError, match="relative"):
        file_url(Path("a.png"))
