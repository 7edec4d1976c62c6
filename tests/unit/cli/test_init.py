"""`mmrouter init`: whatever is answered, the file is a deployment that says it, and can be rendered."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mmrouter_cli import init
from mmrouter_cli.app import app
from mmrouter_lib.api import parse_deployment
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render

SECRETS = new_secret_data()
FLAGS = ("--model", "--engine", "--accelerator", "--replicas", "--name", "--image")
VALUES = ("org/Some-Model.1", "sglang", "intel-xe", "3", "mine", "registry.example/engine:1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.yaml"


def run(*arguments: str, answers: str = "") -> Result:
    return CliRunner().invoke(app, ["init", *arguments], input=answers, catch_exceptions=False)


def made(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(file.read_text())
    return content


@pytest.mark.parametrize("given_flags", list(itertools.product([False, True], repeat=len(FLAGS))))
def test_every_combination_of_options_is_a_valid_deployment_that_says_what_was_given(
    file: Path, given_flags: tuple[bool, ...]
) -> None:
    chosen = {flag: value for flag, value, take in zip(FLAGS, VALUES, given_flags, strict=True) if take}
    result = run(str(file), "--yes", *itertools.chain(*chosen.items()))
    assert result.exit_code == 0, result.output
    content = made(file)
    dep = parse_deployment(content)
    render(dep, secrets=SECRETS)
    defaults = init.Answers()
    (pool,) = dep.spec.pools
    model = chosen.get("--model", defaults.model)
    assert dep.spec.model.id == model
    assert dep.spec.engine.type == chosen.get("--engine", defaults.engine)
    assert pool.accelerator.kind == chosen.get("--accelerator", defaults.accelerator)
    assert pool.replicas == int(chosen.get("--replicas", defaults.replicas))
    assert dep.metadata.name == chosen.get("--name", init.name_of(model))
    if "--image" in chosen:
        assert dep.spec.engine.image == chosen["--image"]


@pytest.mark.parametrize(("engine", "kind"), list(itertools.product(init.ENGINES, init.KINDS)))
def test_every_engine_on_every_accelerator_can_be_rendered_and_asks_for_an_image_where_none_is_published(
    file: Path, engine: str, kind: str
) -> None:
    result = run(str(file), "--yes", "--engine", engine, "--accelerator", kind)
    dep = parse_deployment(made(file))
    render(dep, secrets=SECRETS)
    placeholder = dep.spec.engine.image.startswith("registry.example/")
    assert placeholder == ("put your own into" in result.stderr)
    bare = made(file)
    bare["spec"]["engine"].pop("image", None)
    if not placeholder:
        render(parse_deployment(bare), secrets=SECRETS)


@given(
    st.text(min_size=1, max_size=60),
    st.sampled_from(init.ENGINES),
    st.sampled_from(init.KINDS),
    st.integers(1, init.MOST_REPLICAS),
    st.one_of(st.from_regex(r"([a-z][-a-z0-9]{0,38}[a-z0-9]?)?", fullmatch=True), st.sampled_from(["", "no", "y"])),
    st.text(max_size=60),
)
def test_an_answer_that_is_taken_stands_in_the_file_letter_by_letter(
    model: str, engine: str, kind: str, replicas: int, name: str, image: str
) -> None:
    read: dict[str, Any] = init.READ
    try:
        answers = init.Answers(read["model"](model), engine, kind, replicas, read["name"](name), read["image"](image))
    except init.AnswerError:
        return
    dep = parse_deployment(init.resource(answers))
    assert dep.spec.model.id == model.strip()
    assert dep.metadata.name == answers.object_name
    if answers.image:
        assert dep.spec.engine.image == image.strip()
    assert (dep.spec.pools[0].replicas, dep.spec.pools[0].accelerator.kind) == (replicas, kind)
    render(dep, secrets=SECRETS)


@given(st.text(max_size=80))
def test_every_model_gives_a_name_that_a_deployment_can_have(model: str) -> None:
    parse_deployment({**init.resource(init.Answers()), "metadata": {"name": init.name_of(model)}})


def test_there_are_four_questions_and_enter_takes_the_default(file: Path) -> None:
    result = run(str(file), answers="org/model\nsglang\n\n4\n")
    assert result.exit_code == 0
    assert [result.stderr.count(question) for question in init.QUESTIONS.values()] == [1] * 4
    spec = made(file)["spec"]
    assert spec["engine"] == {"type": "sglang"}
    assert spec["pools"][0] == {"name": "worker", "role": "worker", "replicas": 4, "accelerator": {"kind": "nvidia"}}


def test_a_bad_answer_repeats_the_question_with_the_reason(file: Path) -> None:
    result = run(str(file), answers="a model\norg/model\nollama\nvllm\ntpu\namd\nmany\n0\n2\n")
    assert result.exit_code == 0, result.output
    assert "'ollama' is none of vllm, sglang" in result.stderr
    assert "'0' is not a number from 1 to 1000" in result.stderr
    assert parse_deployment(made(file)).spec.pools[0].accelerator.kind == "amd"


BAD_VALUES = {
    "--model": {"two words": "does not match", "": "at least 1 character"},
    "--engine": {"ollama": "is none of vllm, sglang"},
    "--accelerator": {"tpu": "is none of nvidia"},
    "--replicas": {"0": "is not a number from 1 to 1000", "٣": "is not a number"},
    "--name": {"Upper": "does not match", "a" * 41: "at most 40 characters"},
    "--image": {"two words": "does not match"},
}


@pytest.mark.parametrize(("flag", "value"), [(flag, value) for flag, values in BAD_VALUES.items() for value in values])
def test_a_bad_option_ends_with_status_2_and_a_sentence_and_writes_nothing(file: Path, flag: str, value: str) -> None:
    result = run(str(file), "--yes", flag, value)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mmrouter: {flag}: ")
    assert BAD_VALUES[flag][value] in result.stderr
    assert not file.exists()


def test_a_file_that_is_there_is_written_over_with_force_only(file: Path) -> None:
    file.write_text("mine")
    refused = run(str(file), "--yes")
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    assert run(str(file), "--yes", "--force").exit_code == 0
    assert made(file)["kind"] == "MMRouterDeployment"


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("none/a.yaml", ["--yes"], "No such file or directory"),
        ("a.yaml", ["--model", "org/model"], "give --engine, or --yes"),  # at the end of input
    ],
)
def test_a_missing_folder_or_answer_is_status_2_and_named(
    tmp_path: Path, name: str, options: list[str], says: str
) -> None:
    result = run(str(tmp_path / name), *options)
    assert (result.exit_code, says in result.stderr) == (2, True)


def test_with_a_dash_the_file_is_printed_and_nothing_else() -> None:
    result = run("-", "--yes")
    assert parse_deployment(yaml.safe_load(result.stdout)).metadata.name == "qwen2-5-vl-3b-instruct"


def test_the_last_line_is_the_next_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    done = CliRunner().invoke(app, ["init", str(file), "--yes"])
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == f"mmrouter plan {file}"
