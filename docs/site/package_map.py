"""Draws which package imports which, as docs/change/packages.svg, from the imports in the sources.

    python docs/site/package_map.py            # writes the picture
    python docs/site/package_map.py --check    # exit code 1 if the picture is not what the sources say

A package stands in the lowest row that is above all packages that it imports. An arrow that follows
from others is left out: `train` imports `checkpoint`, which imports `moe`, so `train` to `moe` is not drawn.
"""

import argparse
import ast
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"
PICTURE = ROOT / "docs/change/packages.svg"
# Each of these counts as a package of its own; the modules at the top are drawn as one box.
NESTED = ("apps", "parallel.zero")
BASE = ("errors", "io", "registry", "redaction", "host_memory")
LEFT_OUT = ("__init__", "__main__", "cli")
WIDTH, ROW, BOX, HIGH = 1240, 84, 26, 13  # pixels: the picture, between rows, a box' height, a letter's
BLUE, ORANGE, GREY = (
    "#0072b2",
    "#d55e00",
    "#8a8a8a",
)  # the first two of Okabe and Ito, apart for every kind of sight


def package_of(module: str) -> str:
    """`moe` of megamoe.moe.router, `apps.hf` of megamoe.apps.hf.rules, `foundation` of megamoe.errors."""
    parts = module.split(".")[1:] or ["__init__"]
    if parts[0] == "apps" and len(parts) > 1:
        return f"apps.{parts[1]}"
    if ".".join(parts[:2]) in NESTED:
        return ".".join(parts[:2])
    return "foundation" if parts[0] in BASE else parts[0]


def imports() -> dict[str, set[str]]:
    """For each package, the packages that its files import, in functions too."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        package = package_of(module)
        if package in LEFT_OUT or package in ("apps", "apps.command"):
            continue
        names = found.setdefault(package, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megamoe."):
                names.add(package_of(f"{node.module}.{node.names[0].name}"))
            elif isinstance(node, ast.Import):
                names |= {package_of(alias.name) for alias in node.names if alias.name.startswith("megamoe.")}
    return {
        package: {name for name in names if name in found} - {package} for package, names in found.items()
    }


def reached(graph: dict[str, set[str]], package: str) -> set[str]:
    """All packages that this one imports, directly or through others."""
    found: set[str] = set()
    waiting = list(graph[package])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph[name])
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the arrows that follow from others."""
    beyond = {package: reached(graph, package) for package in graph}
    return {
        package: {name for name in names if not any(name in beyond[other] for other in names - {name})}
        for package, names in graph.items()
    }


def rows(graph: dict[str, set[str]]) -> list[list[str]]:
    """The packages by row, the lowest first; a circle of imports is an error."""
    level: dict[str, int] = {}
    while len(level) < len(graph):
        free = [p for p, names in graph.items() if p not in level and names <= level.keys()]
        if not free:
            raise SystemExit(f"error: a circle of imports among {sorted(graph.keys() - level.keys())}")
        level |= {package: 1 + max((level[name] for name in graph[package]), default=-1) for package in free}
    found: list[list[str]] = [[] for _ in range(1 + max(level.values()))]
    for package in sorted(level):
        found[level[package]].append(package)
    return found


def places(levels: list[list[str]], arrows: dict[str, set[str]]) -> dict[str, tuple[float, float]]:
    """The middle of each box; within a row, packages stand above the middle of what they import."""
    found: dict[str, tuple[float, float]] = {}
    for number, names in enumerate(levels):
        below = {n: [found[b][0] for b in arrows[n] if b in found] for n in names}
        ordered = sorted(names, key=lambda n: (sum(below[n]) / len(below[n]) if below[n] else WIDTH / 2, n))
        widths = [width_of(name) for name in ordered]
        gap = (WIDTH - sum(widths)) / (len(ordered) + 1)
        x = gap
        for name, width in zip(ordered, widths, strict=True):
            found[name] = (round(x + width / 2, 1), ROW * (len(levels) - number) - ROW / 2)
            x += width + gap
    return found


def width_of(package: str) -> float:
    """Of its box, in pixels."""
    return 7.4 * len(label_of(package)) + 16


def label_of(package: str) -> str:
    """What stands in its box."""
    return "errors, io, registry, ..." if package == "foundation" else package.replace(".", "/")


def picture() -> str:
    """The SVG."""
    graph = imports()
    levels, arrows = rows(graph), reduced(graph)
    at = places(levels, arrows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {ROW * len(levels)}" role="img" '
        f'font-family="sans-serif" font-size="{HIGH}">',
        "<title>The packages of megamoe: each imports only packages in rows below its own</title>",
        f'<rect width="{WIDTH}" height="{ROW * len(levels)}" fill="#ffffff"/>',
    ]
    lines += [
        arrow(at[package], at[name], colour_of(package))
        for package in sorted(arrows)
        for name in sorted(arrows[package])
    ]
    for package, (x, y) in sorted(at.items()):
        lines += box(x - width_of(package) / 2, y - BOX / 2, width_of(package), colour_of(package))
        lines.append(text(x, y + 4.5, label_of(package), 'text-anchor="middle"'))
    legend = ((BLUE, "core"), (ORANGE, "applications (megamoe/apps)"), (GREY, "single modules"))
    for number, (colour, meaning) in enumerate(legend):
        lines += box(10, 8 + 34 * number, 30, colour)
        lines.append(text(48, 25.5 + 34 * number, meaning))
    return "\n".join([*lines, "</svg>", ""])


def colour_of(package: str) -> str:
    """Of its box and of its arrows."""
    return GREY if package == "foundation" else ORANGE if package.startswith("apps.") else BLUE


def arrow(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    """A curve from the lower side of a box to the upper side of another."""
    (x, y), (to_x, to_y) = start, end
    middle = (y + to_y) / 2
    curve = f"M{x} {y + BOX / 2} C{x} {middle} {to_x} {middle} {to_x} {to_y - BOX / 2}"
    return f'<path d="{curve}" fill="none" stroke="{colour}" stroke-opacity="0.45"/>'


def box(x: float, y: float, width: float, colour: str) -> list[str]:
    """A rectangle with round corners."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX}" rx="5"'
    return [f'<rect {size} fill="#ffffff" stroke="{colour}" stroke-width="1.5"/>']


def text(x: float, y: float, words: str, more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" fill="#1a1a1a" {more}>{escape(words)}</text>'


def main(arguments: list[str] | None = None) -> int:
    """Write or check the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(arguments)
    drawn = picture()
    if args.check:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
