"""Catalogues: what is found where, which pairs a catalogue gives, and each kind of broken one."""

import zipfile
from pathlib import Path

import polib
import pytest

from megamoe.apps.translation.catalogues import CatalogueFile, find_catalogues, read_catalogue
from megamoe.apps.translation.pairs import Counts, normalize_language, select_languages
from megamoe.errors import UserError
from tests.support.data.catalogue_files import HEADER, entry, write_po

PLURAL = 'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "{}"\nmsgstr[1] "{}"\nmsgstr[2] "{}"\n\n'
RUSSIAN = "(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2)"


def pairs_of(path: Path) -> tuple[list[tuple[str, str]], Counts]:
    counts = Counts()
    [file] = find_catalogues([str(path)])
    return [(pair.source, pair.target) for pair in read_catalogue(file, counts)], counts


def test_entries_that_are_kept_and_left_out(tmp_path: Path) -> None:
    path = write_po(
        tmp_path / "de.po",
        entry("Hello, %(name)s and {other} %s", "Hallo, %(name)s und {other} %s"),
        entry("a\\nb", "c\\nd"),
        entry("no translation", ""),
        entry("guessed", "geraten", "#, fuzzy, python-format"),
        entry("to a friend", "an dich", 'msgctxt "informal"'),
        '#~ msgid "old"\n#~ msgstr "alt"\n',
    )
    expected = [
        ("Hello, %(name)s and {other} %s", "Hallo, %(name)s und {other} %s"),
        ("a\nb", "c\nd"),
        ("to a friend", "an dich"),
    ]
    found, counts = pairs_of(path)
    assert found == expected
    assert counts.left_out == {"without translation": 1, "fuzzy": 1, "obsolete": 1}
    polib.pofile(str(path)).save_as_mofile(str(tmp_path / "fr.mo"))
    assert pairs_of(tmp_path / "fr.mo")[0] == expected
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert pairs_of(path)[0] == expected


@pytest.mark.parametrize(
    ("forms", "formula", "texts", "one", "many"),
    [
        (2, "(n != 1)", ("%d Tag", "%d Tage", ""), "%d Tag", "%d Tage"),
        (3, RUSSIAN, ("%d день", "%d дня", "%d дней"), "%d день", "%d дней"),
        (1, "0", ("%d 日", "", ""), "%d 日", "%d 日"),
        (3, "nonsense(n)", ("a", "b", "c"), "a", "c"),  # no formula: the first and the last form
    ],
)
def test_plural_forms(
    tmp_path: Path, forms: int, formula: str, texts: tuple[str, ...], one: str, many: str
) -> None:
    header = HEADER.format(forms=forms, formula=formula)
    found, _ = pairs_of(write_po(tmp_path / "de.po", PLURAL.format(*texts), header=header))
    assert found == [("%d day", one), ("%d days", many)]


def test_a_comment_gives_the_text_of_a_key(tmp_path: Path) -> None:
    found, _ = pairs_of(
        write_po(
            tmp_path / "de.po",
            entry("label_title", "Titel", '#. Default: "The "big" title"'),
            entry("label_more", "Mehr", '#. Default: ""', '#. "Some more "', '#. "text"', "#. of nothing"),
            entry("label_none", "Nichts", "#. Note: nothing"),
        )
    )
    assert found == [('The "big" title', "Titel"), ("Some more text", "Mehr"), ("label_none", "Nichts")]


def test_plural_and_default_say_which_message_it_is(tmp_path: Path) -> None:
    path = write_po(tmp_path / "de.po", PLURAL.format("a", "b", ""), entry("k", "t", '#. Default: "Text"'))
    [file] = find_catalogues([str(path)])
    assert [pair.identities for pair in read_catalogue(file, Counts())] == [
        ("%d day", "%d days"),
        ("%d day", "%d days"),
        ("k",),
    ]


def test_folders_and_wheels(tmp_path: Path) -> None:
    root = tmp_path / "site"
    for inside in (
        "pkg/conf/locale/pt_BR/LC_MESSAGES/django.po",
        "pkg/conf/locale/pt_BR/LC_MESSAGES/djangojs.po",
        "pkg/app/locales/locales/de/LC_MESSAGES/plone.po",
        "pkg/i18n/sr@latin.po",
        "pkg/tests/locale/fr/LC_MESSAGES/django.po",  # test data of the package
        "pkg/locale/templates/LC_MESSAGES/django.po",  # no language
    ):
        write_po(root / inside, entry("one", "two"))
    (root / "pkg/conf/locale/pt_BR/LC_MESSAGES/django.mo").write_bytes(b"not read: there is a .po")
    (root / "pkg/__init__.py").write_text("raise RuntimeError('imported')")
    expected = [
        ("de", "pkg.app.locales/plone", (".po",)),
        ("pt_BR", "pkg.conf", (".po", ".mo")),
        ("pt_BR", "pkg.conf", (".po",)),
        ("sr_Latn", "pkg", (".po",)),
    ]

    def facts(files: list[CatalogueFile]) -> list[tuple[str, str, tuple[str, ...]]]:
        return [(file.language, file.label, tuple(file.files)) for file in files]

    assert facts(find_catalogues([str(root / "pkg")])) == expected
    with zipfile.ZipFile(tmp_path / "pkg-1.whl", "w") as wheel:
        for path in root.rglob("*.*o"):
            wheel.write(path, path.relative_to(root))
    in_wheel = find_catalogues([str(tmp_path / "pkg-1.whl")])
    assert facts(in_wheel) == expected
    assert [pair.target for pair in read_catalogue(in_wheel[0], Counts())] == ["two"]


def test_a_broken_file_is_replaced_by_the_compiled_one(tmp_path: Path) -> None:
    path = write_po(tmp_path / "app" / "locale" / "de" / "LC_MESSAGES" / "django.po", entry("one", "eins"))
    polib.pofile(str(path)).save_as_mofile(str(path.with_suffix(".mo")))
    path.write_text("msgid\n")
    found, counts = pairs_of(tmp_path / "app")
    assert found == [("one", "eins")]
    [warning] = counts.warnings
    assert "django.po: broken: syntax error, line 1" in warning and "django.mo is read instead" in warning


BROKEN = {
    "de.po": (b"", "de.po: empty file"),
    "fr.po": (b'msgid "a"\nmsgtsr "b"\n', r"fr.po: broken: syntax error, line 2"),
    "it.po": (TWO := HEADER.encode() + b'msgid "a"\nmsgstr "\xff"\n', r"it.po: line 7 is not utf-8 text"),
    "nl.po": (TWO.replace(b"utf-8", b"klingon"), r"nl.po: unknown encoding 'klingon'"),
    "es.mo": (b"\xde\x12\x04\x95" + b"\0" * 10, r"es.mo: broken: "),
    "ru.mo": (b"no catalogue at all, but long enough to have a header", r"ru.mo: broken: .*magic"),
    "pl.mo": (b"\xde\x12\x04\x95\0\0\0\0\x09\0\0\0" + b"\x1c\0\0\0" * 4, r"pl.mo: broken: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_catalogues(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        pairs_of(tmp_path / name)
    assert "\n" not in str(caught.value) and "--skip-broken" in str(caught.value)


def test_items_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "bad.whl").write_text("x")
    for item, message in {
        str(tmp_path / "empty"): "no .po or .mo file in it",
        str(tmp_path / "missing" / "folder"): "does not exist; name one, such as the wheel",
        str(tmp_path / "notes.txt"): "is no folder, wheel, .po or .mo file",
        str(tmp_path / "bad.whl"): "cannot be read.*download the wheel again",
    }.items():
        with pytest.raises(UserError, match=message):
            find_catalogues([item])


def test_codes_of_languages() -> None:
    codes = {
        "DE": "de",
        "pt-br": "pt_BR",
        "sr@latin": "sr_Latn",
        "sr@Latn": "sr_Latn",
        "zh_hans_hk": "zh_Hans_HK",
        "es_419": "es_419",
        "de_DE.UTF-8": "de_DE",
    }
    assert {code: normalize_language(code) for code in codes} == codes
    assert {normalize_language(code) for code in ("templates", "x", "", "de-")} == {None}
    assert select_languages(["pt-br", "de"], {"de", "pt_BR", "fr"}) == ["de", "pt_BR"]
    with pytest.raises(UserError, match=r"language 'pt' is not in the data; near ones are pt_BR, pt_PT"):
        select_languages(["pt"], ["de", "pt_BR", "pt_PT"])
    with pytest.raises(UserError, match=r"language 'xx' .*there are de, fr"):
        select_languages(["xx"], ["de", "fr"])
