"""Answers of an engine's own code are kept for the same code, program and input, wherever they lie."""

import sys
from pathlib import Path

import pytest
from conformance import own_code
from conformance.own_code import EngineError, answer_of

COUNTING = """
import json, pathlib, sys
runs = pathlib.Path({runs!r})
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
asked = json.load(sys.stdin)
print(json.dumps([pathlib.Path(asked["file"]).read_text(), asked["number"]]))
"""


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMROUTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(own_code, "IS_LONG", False)
    made = tmp_path / "engine-1.0"
    (made / "bin").mkdir(parents=True)
    (made / "bin" / "python").symlink_to(sys.executable)
    (made / "mmrouter-recipe").write_text("one")
    return made


def ask(env: Path, runs: Path, file: str, text: str, number: int = 1) -> tuple[object, int]:
    """Return the answer, and how often the program has run."""
    path = env.parent / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    answer = answer_of(env, ["-c", COUNTING.format(runs=str(runs))], {"file": str(path), "number": number})
    return answer, len(runs.read_text())


def test_the_same_content_in_another_folder_has_a_kept_answer(env: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert ask(env, runs, "a/picture", "red") == (["red", 1], 1)
    assert ask(env, runs, "b/picture", "red") == (["red", 1], 1)


def test_a_kept_answer_names_the_files_of_the_run_that_takes_it(env: Path, tmp_path: Path) -> None:
    """One path may be the beginning of another."""
    for folder in ("a", "b"):
        (files := [tmp_path / folder / name for name in ("picture", "picture.png")])[0].parent.mkdir()
        for file in files:
            file.write_text(file.name)
        answer = answer_of(
            env,
            ["-c", "import json, sys; print(json.dumps({p: [p] for p in json.load(sys.stdin)}))"],
            [str(file) for file in files],
        )
        assert answer == {str(file): [str(file)] for file in files}
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_another_content_input_or_recipe_runs_the_program_again(env: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    ask(env, runs, "a/picture", "red")
    assert ask(env, runs, "a/picture", "blue") == (["blue", 1], 2)
    assert ask(env, runs, "a/picture", "blue", number=2) == (["blue", 2], 3)
    (env / "mmrouter-recipe").write_text("two")
    assert ask(env, runs, "a/picture", "blue", number=2) == (["blue", 2], 4)


def test_the_long_form_runs_the_program_again(env: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "IS_LONG", True)
    runs = tmp_path / "runs"
    assert [ask(env, runs, "a/picture", "red")[1] for _ in range(2)] == [1, 2]


def test_an_error_is_not_kept(env: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ValueError: no such model"):
        answer_of(env, ["-c", "raise ValueError('no such model')"])
    assert not list((tmp_path / "cache").rglob("*.json"))
