"""Texts that come from elsewhere, as messages show them: short, on one line, and nothing that a terminal obeys."""


def shown(value: object, limit: int = 80) -> str:
    """A value from a file as a message shows it: on one line and short, however hostile."""
    head = value[: limit + 1] if isinstance(value, str | bytes) else value
    text = repr(head)
    return text if len(text) <= limit else f"{text[:limit]}..."


def one_line(text: str, limit: int = 300) -> str:
    """Somebody else's error message on one line, cut to ``limit`` characters."""
    flat = " ".join(text[: 4 * limit].split())
    return flat if len(flat) <= limit else f"{flat[:limit]}..."


def printable(text: str) -> str:
    """A text in one line that no terminal obeys: names and reasons come from files that anybody may have written."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
