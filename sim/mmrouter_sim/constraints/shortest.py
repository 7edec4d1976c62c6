"""The shortest text of a form, in time that grows with the form's size and not with the number of its texts."""

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush

MAX_TEXT = 16_384
"""Characters of an answer in a form."""


class FormError(Exception):
    """A form that has no answer, or that is not simulated. ``field``: the request's field, where it is known."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(eq=False, slots=True)
class Form:
    """A set of texts: the one ``text``; or those of any of ``parts``; or one of each part in order, ``times`` over."""

    parts: "list[Form]" = field(default_factory=list)
    any: bool = False
    text: str = ""
    times: int = 1


def shortest(root: Form) -> str:
    """Return the shortest text, the first found of several. Forms may contain themselves.

    A form is settled with its shortest text once no shorter one can come, as in D. E. Knuth, "A generalization of
    Dijkstra's algorithm", Information Processing Letters 6 (1977). Raises :class:`FormError`.
    """
    users: dict[Form, list[Form]] = defaultdict(list)
    forms, numbers = [root], {root: 0}
    for form in forms:
        for part in form.parts:
            users[part].append(form)
            if part not in numbers:
                numbers[part] = len(forms)
                forms.append(part)
    missing = {form: len(form.parts) for form in forms}
    settled: dict[Form, str] = {}
    offered: list[tuple[int, int, str]] = []  # length, number of the form, text
    too_long = False

    def offer(form: Form, text: str) -> None:
        heappush(offered, (len(text), numbers[form], text))

    for form in forms:
        if form.times == 0 or not (form.parts or form.any):
            offer(form, form.text)
    while offered:
        _, number, text = heappop(offered)
        form = forms[number]
        if form in settled:
            continue
        if form is root:
            return text
        settled[form] = text
        for user in users[form]:
            if user.any:
                offer(user, text)
                continue
            missing[user] -= 1
            if missing[user]:
                continue
            if sum(len(settled[part]) for part in user.parts) * user.times <= MAX_TEXT:
                offer(user, "".join(settled[part] for part in user.parts) * user.times)
            else:
                too_long = True
    raise FormError(f"its answers are longer than {MAX_TEXT} characters" if too_long else "no text has its form")
