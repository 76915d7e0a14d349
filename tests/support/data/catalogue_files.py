"""Small catalogues for the tests, written as .po text."""

from pathlib import Path

HEADER = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=utf-8\\n"\n'
    '"Plural-Forms: nplurals={forms}; plural={formula};\\n"\n\n'
)
TWO_FORMS = HEADER.format(forms=2, formula="(n != 1)")


def entry(source: str, target: str, *lines: str) -> str:
    """An entry; lines: comments and flags before it."""
    return "".join(f"{line}\n" for line in lines) + f'msgid "{source}"\nmsgstr "{target}"\n\n'


def write_po(path: Path, *entries: str, header: str = TWO_FORMS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "".join(entries), encoding="utf-8")
    return path


def write_package(folder: Path, languages: dict[str, str]) -> Path:
    """A folder with two modules and their catalogues; languages: a word for each, which begins every target.

    Messages: 30 of `app/shop` (with three words), 30 of `app/blog`.
    """
    for language, word in languages.items():
        for module in ("shop", "blog"):
            entries = [
                entry(f"{module} message {number} %(name)s", f"{word} {module} {number} %(name)s")
                for number in range(30)
            ]
            write_po(folder / module / "locale" / language / "LC_MESSAGES" / "django.po", *entries)
    return folder
