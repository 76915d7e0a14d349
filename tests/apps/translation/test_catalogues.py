"""examples/catalogues: which pairs and labels catalogues give, from folders and wheels, and broken ones."""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polib
import pytest

from megamoe.apps.translation.pairs import Counts, Pair
from megamoe.apps.translation.select import split_pairs
from tests.support.refusals import Case, cases, told
from tests.support.tiny import ROOT

sys.path.append(str(ROOT / "examples/catalogues"))
from prepare_catalogues import find_catalogues, main, read_catalogue, write_labels

HEADER = (
    'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=utf-8\\n"\n'
    '"Plural-Forms: nplurals={forms}; plural={formula};\\n"\n\n'
)
TWO_FORMS = HEADER.format(forms=2, formula="(n != 1)")
PLURAL = 'msgid "%d day"\nmsgid_plural "%d days"\nmsgstr[0] "{}"\nmsgstr[1] "{}"\nmsgstr[2] "{}"\n\n'
RUSSIAN = "(n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2)"


def entry(source: str, target: str, *lines: str) -> str:
    """An entry; lines: comments and flags before it."""
    return "".join(f"{line}\n" for line in lines) + f'msgid "{source}"\nmsgstr "{target}"\n\n'


def write_po(path: Path, *entries: str, header: str = TWO_FORMS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "".join(entries), encoding="utf-8")
    return path


def read(path: Path) -> tuple[list[Pair], Counts]:
    counts = Counts()
    [file] = find_catalogues(str(path))
    return list(read_catalogue(file, counts)), counts


def pairs_of(path: Path) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in read(path)[0]]


def test_entries_that_are_kept_and_left_out(tmp_path: Path) -> None:
    text = "Hello, %(name)s and {other} %s", "Hallo, %(name)s und {other} %s"
    path = write_po(
        tmp_path / "de.po",
        entry(*text),
        entry("a\\nb", "c\\nd"),
        entry("no translation", ""),
        entry("guessed", "geraten", "#, fuzzy, python-format"),
        entry("to a friend", "an dich", 'msgctxt "informal"'),
        entry("label_title", "Titel", '#. Default: "The "big" title"'),
        entry("label_more", "Mehr", '#. Default: ""', '#. "Some more "', '#. "text"', "#. of nothing"),
        entry("label_none", "Nichts", "#. Note: nothing"),
        '#~ msgid "old"\n#~ msgstr "alt"\n',
    )
    keys = [('The "big" title', "Titel"), ("Some more text", "Mehr"), ("label_none", "Nichts")]
    expected = [text, ("a\nb", "c\nd"), ("to a friend", "an dich"), *keys]
    assert pairs_of(path) == expected
    assert read(path)[1].left_out == {"without translation": 1, "fuzzy": 1, "obsolete": 1}
    assert [pair.identities for pair in read(path)[0]][3] == ("label_title",)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    assert pairs_of(path) == expected
    polib.pofile(str(path)).save_as_mofile(str(tmp_path / "fr.mo"))  # which has no comments
    assert pairs_of(tmp_path / "fr.mo")[:3] == expected[:3]


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
    path = write_po(tmp_path / "de.po", PLURAL.format(*texts), header=header)
    assert pairs_of(path) == [("%d day", one), ("%d days", many)]
    assert {pair.identities for pair in read(path)[0]} == {("%d day", "%d days")}


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
    expected = [
        ("de", "pkg.app.locales/plone", [".po"]),
        ("pt_BR", "pkg.conf", [".po", ".mo"]),
        ("pt_BR", "pkg.conf", [".po"]),
        ("sr_Latn", "pkg", [".po"]),
    ]
    with zipfile.ZipFile(tmp_path / "pkg-1.whl", "w") as wheel:
        for path in root.rglob("*.*o"):
            wheel.write(path, path.relative_to(root))
    for item in (root / "pkg", tmp_path / "pkg-1.whl"):
        found = find_catalogues(str(item))
        assert [(file.language, file.label, [*file.files]) for file in found] == expected
        assert [pair.target for pair in read_catalogue(found[0], Counts())] == ["two"]


def test_a_broken_file_is_replaced_by_the_compiled_one(tmp_path: Path) -> None:
    path = write_po(tmp_path / "app" / "locale" / "de" / "LC_MESSAGES" / "django.po", entry("one", "eins"))
    polib.pofile(str(path)).save_as_mofile(str(path.with_suffix(".mo")))
    path.write_text("msgid\n")
    assert pairs_of(tmp_path / "app") == [("one", "eins")]
    [warning] = read(tmp_path / "app")[1].warnings
    assert "django.po: broken: syntax error, line 1" in warning and "django.mo is read instead" in warning


@pytest.mark.parametrize("case", cases("translation", "catalogue: "))
def test_broken_catalogues(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    path = tmp_path / case["file"]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(case["text"].encode("latin-1"))
    expect_message(case, told(lambda: read(tmp_path / Path(case["file"]).parts[0])))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels are applications; a broken catalogue is an error, or is left out."""
    for name in ("app", "other"):
        for module in ("one", "two"):
            entries = [entry(f"{name} {module} {n} text", f"ein {name} {module} {n}") for n in range(20)]
            write_po(tmp_path / name / module / "locale/de/LC_MESSAGES/django.po", *entries)
    write_po(tmp_path / "app/fr.po").write_text("msgid\n")
    arguments = [str(tmp_path / name) for name in ("app", "other")]
    arguments += ["--label-by", "application", "--min-label", "5", "--max-label", "9"]
    arguments += ["--tokenizer", "bytes", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "fr.po: broken: syntax error" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*arguments, "--skip-broken"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("warning: left out: ") and "1 broken catalogues" in said.out
    card = json.loads((tmp_path / "out/labels/labels.json").read_text())
    assert card["train"] == {"app": 9, "other": 9} and "labels: 2" in said.out
    write_po(tmp_path / "empty/de.po", entry("one", ""))
    assert main([str(tmp_path / "empty"), "--output", str(tmp_path / "none")]) == 2
    assert "empty: no message in it is translated" in capsys.readouterr().err


def labelled(folder: Path, pairs: list[Pair], splits: list[str], least: int, most: Any = None) -> Any:
    """The card of the labels, and a function that returns the rows of a set."""
    write_labels(pairs, splits, "en", least, folder / "labels", most)

    def rows(name: str) -> list[dict[str, str]]:
        path = folder / "labels" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    return json.loads((folder / "labels/labels.json").read_text()), rows


def test_labels(tmp_path: Path) -> None:
    pairs = [
        Pair(f"{label} {n}", f"{language} {label} {n}", language, label)
        for language in ("de", "fr")
        for label in ("shop", "blog", "rare")
        for n in range(3 if label == "rare" else 30)
    ]
    pairs.append(Pair("shop 1", "zweimal", "de", "blog"))  # two labels: left out
    splits = split_pairs(pairs, [0.6, 0.2, 0.2])
    card, rows = labelled(tmp_path, pairs, splits, 10)
    assert card["labels"] == ["blog", "shop"]
    sets = ("test.de", "test.en", "test.fr", "train", "valid")
    assert sorted(card["files"]) == [f"{name}.jsonl" for name in sets]
    for name in sets:
        split, _, language = name.partition(".")
        of_split = {pair.source for pair, own in zip(pairs, splits, strict=True) if own == split}
        wanted = {source for source in of_split if source != "shop 1" and not source.startswith("rare")}
        assert card["files"][f"{name}.jsonl"]["examples"] == len(rows(name)) == len(wanted)
        assert {row["text"].removeprefix(f"{language} ") for row in rows(name)} == wanted
        assert all(
            row["label"] in row["text"] and row["language"] == (language or "en") for row in rows(name)
        )
    assert write_labels(pairs, splits, "en", 1000, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_translation_with_several_labels_is_left_out(tmp_path: Path) -> None:
    """A word of two messages with different labels, one of them perhaps in training."""
    pairs = [
        Pair("open a file", "öffnen", "de", "editor"),
        Pair("unlock", "öffnen", "de", "bank"),
        Pair("open a file", "ouvrir", "fr", "editor"),
        Pair("save", "sichern", "de", "editor"),
        Pair("secure", "sichern", "de", "bank"),
        Pair("close", "schließen", "de", "editor"),
        Pair("close it", "schließen", "de", "editor"),
        *(Pair(f"{label} {n}", "x", "de", label) for label in ("editor", "bank") for n in range(3)),
    ]
    _, rows = labelled(tmp_path, pairs, ["test"] * 4 + ["train"] + ["test"] * 2 + ["train"] * 6, 3)
    texts = {language: [row["text"] for row in rows(f"test.{language}")] for language in ("de", "fr", "en")}
    english = ["open a file", "unlock", "save", "close", "close it"]
    assert texts == {"de": ["schließen"], "fr": ["ouvrir"], "en": english}


def test_at_most_so_many_texts_of_a_label(tmp_path: Path) -> None:
    """The same messages in all languages, also where one translation is of several messages."""
    pairs = [
        Pair(f"{label} {n}", f"{language} {label} {n // 2 + shift}", language, label)
        for label, count in (("shop", 40), ("blog", 5))
        for language, shift in (("de", 0), ("fr", 3))
        for n in range(count)
    ]
    train = [Pair(f"{label} train {n}", "x", "de", label) for label in ("shop", "blog") for n in range(6)]
    splits = ["test"] * len(pairs) + ["train"] * len(train)
    card, rows = labelled(tmp_path, [*pairs, *train], splits, 3, {"train": 5, "valid": 1, "test": 8})
    assert card["train"] == {"blog": 5, "shop": 5}
    numbers = {
        language: {(row["label"], int(row["text"].rpartition(" ")[2])) for row in rows(f"test.{language}")}
        for language in ("en", "de", "fr")
    }
    assert sum(label == "shop" for label, _ in numbers["en"]) == 8
    assert {(label, number // 2) for label, number in numbers["en"]} <= numbers["de"]
    assert {(label, number // 2 + 3) for label, number in numbers["en"]} <= numbers["fr"]
