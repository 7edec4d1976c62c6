"""Comparison of engines' releases, for rules that changed with one of them."""


def is_before(release: tuple[int, ...], version: str) -> bool:
    """Whether a version is older than a release. An unreadable version counts as a recent one."""
    numbers = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return bool(numbers) and tuple(numbers) < release
