"""The command `mmrouter init`: options, questions, and the written file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmrouter_cli.options import leave

if TYPE_CHECKING:
    from mmrouter_cli.init.answers import Question


def init(
    file: Annotated[Path, typer.Argument(help="The file to write; - prints it.")] = Path("mmrouter.yaml"),
    model: Annotated[str | None, typer.Option(help="Repository of the model hub.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm or sglang.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="nvidia, amd, intel-i915, intel-xe, gaudi or cpu.")] = None,
    replicas: Annotated[str | None, typer.Option(help="Engine pods.")] = None,
    name: Annotated[str | None, typer.Option(help="The deployment's name. Default: from the model's.")] = None,
    image: Annotated[
        str | None, typer.Option(help="The engine's image. Default: the one its project publishes.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use defaults instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Ask four questions, or take the options, and write a commented MMRouterDeployment."""
    from mmrouter_cli.init import answers as init_answers

    given: dict[str, str | None] = {
        "model": model,
        "engine": engine,
        "accelerator": accelerator,
        "replicas": replicas,
        "name": name,
        "image": image,
    }
    printed = str(file) == "-"
    if not printed and file.exists() and not force:
        leave(f"{file} exists: --force overwrites it")
    values: dict[str, Any] = {}
    for field, answer in given.items():
        if answer is not None:
            try:
                values[field] = init_answers.READ[field](answer)
            except init_answers.AnswerError as error:
                leave(f"--{field}: {error}")
    for question in init_answers.QUESTIONS:
        if question.field not in values and not yes:
            values[question.field] = _ask(question)
    answers = init_answers.Answers(**values)
    if printed:
        typer.echo(init_answers.text(answers), nl=False)
        return
    try:
        init_answers.write(file, answers, force=force)
    except FileExistsError:
        leave(f"{file} exists: --force overwrites it")
    except OSError as error:
        leave(f"cannot write {file}: {error.strerror}")
    if answers.needs_image:
        where = f"{answers.engine} on {answers.accelerator}"
        typer.echo(f"mmrouter: no image of {where} is published: put your own into {file}", err=True)
    typer.echo(f"wrote {file}; apply it with: kubectl apply -f {file}", err=True)


def _ask(question: "Question") -> str | int:
    """Ask until the answer is valid. Ends with status 2 at the end of input."""
    from mmrouter_cli.init import answers as init_answers

    def read(text: str) -> str | int:
        try:
            return question.read(text)
        except init_answers.AnswerError as error:
            raise typer.BadParameter(str(error)) from error

    try:
        answer: str | int = typer.prompt(
            question.text, default=str(getattr(init_answers.Answers(), question.field)), value_proc=read, err=True
        )
    except typer.Abort:
        leave(f"\nno answer: give --{question.field}, or --yes for the defaults")
    return answer
