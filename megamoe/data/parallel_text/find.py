"""Finding message catalogues: in installed packages, wheels and folders. No code of a package is imported.

A catalogue is a file LANGUAGE/LC_MESSAGES/DOMAIN.po, or the compiled DOMAIN.mo; otherwise a file
LANGUAGE.po or LANGUAGE.mo. Where both are present the .po is read: it has the comments too.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath

from megamoe.data.parallel_text.languages import normalize_language
from megamoe.errors import UserError

ENDINGS = (".po", ".mo")
CATALOGUE_FOLDER = "LC_MESSAGES"
NOT_CATALOGUES = {"tests", "test", "testing"}  # test data of the packages
GENERIC_DOMAINS = {"django", "messages", "default"}  # which say nothing of the module
LOCALE_FOLDERS = {"locale", "locales", "translations", "i18n"}
LARGEST_CATALOGUE = 1 << 28  # bytes


@dataclass(frozen=True)
class CatalogueFile:
    """A catalogue, not read yet.

    Attributes:
        name: how it is shown in errors and in the card.
        language: in its normal spelling.
        label: the module that the catalogue belongs to, such as `django.contrib.admin`.
        endings: of .po and .mo, those that are there.
        read: returns the bytes of the file with an ending.
    """

    name: str
    language: str
    label: str
    endings: tuple[str, ...]
    read: Callable[[str], bytes]


def find_catalogues(items: list[str]) -> list[CatalogueFile]:
    """Return the catalogues of installed packages, wheels, folders and .po or .mo files, sorted in each item.

    An item is a path if such a file or folder exists, else the name of an installed package.

    Raises:
        UserError: if an item does not exist or has no catalogue.
    """
    found: list[CatalogueFile] = []
    for item in items:
        catalogues = _in_item(item)
        if not catalogues:
            raise UserError(
                f"catalogues {item!r}: no .po or .mo file in it; expected LANGUAGE/LC_MESSAGES/*.po "
                "(or .mo), or LANGUAGE.po"
            )
        found += catalogues
    return found


def _in_item(item: str) -> list[CatalogueFile]:
    path = Path(item)
    if path.is_dir():
        inside = [file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file()]
        root = path.resolve().name
        return _catalogues(
            item, root, {PurePosixPath(file.relative_to(path).as_posix()): file for file in inside}
        )
    if path.is_file() and path.suffix == ".whl":
        return _in_wheel(item, path)
    if path.is_file() and path.suffix in ENDINGS:
        return _catalogues(str(path.parent), path.parent.name, {PurePosixPath(path.name): path})
    if path.exists() or "/" in item or path.suffix in (*ENDINGS, ".whl"):
        what = "is no folder, wheel, .po or .mo file" if path.exists() else "does not exist"
        raise UserError(f"catalogues {item!r} {what}; expected one, or the name of an installed package")
    return _in_package(item)


def _in_package(name: str) -> list[CatalogueFile]:
    """Return the catalogues of an installed package, by its list of files."""
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise UserError(
            f"catalogues {name!r}: no such package is installed, and no such folder exists; install it with "
            f"'pip install --no-deps {name}', or name a wheel of it ('pip download --no-deps {name}')"
        ) from error
    files = [file for file in distribution.files or [] if file.suffix in ENDINGS]
    paths = {PurePosixPath(file.as_posix()): Path(str(distribution.locate_file(file))) for file in files}
    return _catalogues(name, "", {inside: path for inside, path in paths.items() if path.is_file()})


def _in_wheel(item: str, path: Path) -> list[CatalogueFile]:
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(ENDINGS)]
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"catalogues {item!r} cannot be read: {error}; download the wheel again") from error
    root = zipfile.Path(path)
    return _catalogues(path.name, "", {PurePosixPath(name): root.joinpath(name) for name in names})


def _catalogues(
    item: str, root: str, files: "dict[PurePosixPath, Path] | dict[PurePosixPath, zipfile.Path]"
) -> list[CatalogueFile]:
    """Return the catalogues among files; the keys are their paths inside of the item.

    root: the name of the folder that the paths begin in; empty for a package.
    """
    endings: dict[PurePosixPath, list[str]] = {}
    for inside in files:
        if NOT_CATALOGUES.isdisjoint(inside.parts):
            endings.setdefault(inside.with_suffix(""), []).append(inside.suffix)
    found = []
    for stem in sorted(endings):
        language, folder, domain = _language_and_module(stem)
        if language is None:
            continue
        found.append(
            CatalogueFile(
                name=f"{item}:{stem}" if root == "" else str(PurePosixPath(item) / stem),
                language=language,
                label=_label(root, folder, domain),
                endings=tuple(ending for ending in ENDINGS if ending in endings[stem]),
                read=partial(_read, files, stem),
            )
        )
    return found


def _read(
    files: "dict[PurePosixPath, Path] | dict[PurePosixPath, zipfile.Path]", stem: PurePosixPath, ending: str
) -> bytes:
    """Read one of the files of a catalogue."""
    with files[stem.with_suffix(ending)].open("rb") as file:
        content: bytes = file.read(LARGEST_CATALOGUE)
    return content


def _language_and_module(stem: PurePosixPath) -> tuple[str | None, PurePosixPath, str]:
    """Return the language, the folder of the module, and the domain ("" for LANGUAGE.po)."""
    parent = stem.parent
    if parent.name == CATALOGUE_FOLDER:
        return normalize_language(parent.parent.name), parent.parent.parent, stem.name
    return normalize_language(stem.name), parent, ""


def _label(root: str, folder: PurePosixPath, domain: str) -> str:
    """Return the module's dotted name, with the domain if that says more than `django` or `messages`.

    The catalogues of JavaScript belong to the same module: djangojs is django.
    """
    parts = [part for part in (root, *folder.parts) if part]
    if len(parts) > 1 and parts[-1] in LOCALE_FOLDERS:
        parts.pop()
    module = ".".join(parts)
    domain = domain.removesuffix("js")
    return module if domain in GENERIC_DOMAINS or not domain else f"{module}/{domain}"
