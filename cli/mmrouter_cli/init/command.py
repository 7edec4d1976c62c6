"""`mmrouter init` on a terminal: options in, questions asked, a file written."""

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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not given has its default.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Ask four questions, or take the options, and write a commented MMRouterDeployment."""
    from mmrouter_cli.init import answers as asked

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
        leave(f"{file} is there already: --force writes over it")
    said: dict[str, Any] = {}
    for field, answer in given.items():
        if answer is not None:
            try:
                said[field] = asked.READ[field](answer)
            except asked.AnswerError as error:
                leave(f"--{field}: {error}")
    for question in asked.QUESTIONS:
        if question.field not in said and not yes:
            said[question.field] = _ask(question)
    answers = asked.Answers(**said)
    if printed:
        typer.echo(asked.text(answers), nl=False)
        return
    try:
        asked.write(file, answers, force=force)
    except FileExistsError:
        leave(f"{file} is there already: --force writes over it")
    except OSError as error:
        leave(f"cannot write {file}: {error.strerror}")
    if answers.needs_image:
        where = f"{answers.engine} on {answers.accelerator}"
        typer.echo(f"mmrouter: no image of {where} is published: put your own into {file}", err=True)
    typer.echo(f"wrote {file}; apply it with: kubectl apply -f {file}", err=True)


def _ask(question: "Question") -> str | int:
    """Ask until the answer can be used. Ends with status 2 where nobody answers."""
    from mmrouter_cli.init import answers as asked

    def read(text: str) -> str | int:
        try:
            return question.read(text)
        except asked.AnswerError as error:
            raise typer.BadParameter(str(error)) from error

    try:
        answer: str | int = typer.prompt(
            question.text, default=str(getattr(asked.Answers(), question.field)), value_proc=read, err=True
        )
    except typer.Abort:
        leave(f"\nno answer: give --{question.field}, or --yes for the defaults")
    return answer
