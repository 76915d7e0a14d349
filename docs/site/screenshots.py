"""Takes the pictures of the report that the pages show, in a headless Chromium.

    python docs/site/screenshots.py runs/demo runs/lab/study_cpu/runs/*

The first run is that of docs/demo.png (a light page) and docs/run/report_dark.png; the others,
several seeds of two configurations, are compared in docs/run/report_seeds.png. Of a page only the
sections that are named below are shown, so that the pictures stay small. Debian has the browser:
apt-get install chromium.
"""

import argparse
import base64
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megamoe.apps.report.page import write_page  # noqa: E402
from megamoe.apps.report.run_statistics import read_run  # noqa: E402
from tests.support.apps.browser import CHROMIUM, Page, opened  # noqa: E402

WIDTH = 1000  # pixels
KEEP = """(titles) => document.querySelectorAll("main > section, main > dl").forEach((it) => {
  it.hidden = !(it.matches("dl") || titles.includes(it.querySelector("h2")?.textContent));
  if (it.hidden) it.style.display = "none"; })"""


def main() -> int:
    """Take all pictures; 1 without a browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="the folder of the pictures")
    options = parser.parse_args()
    if CHROMIUM is None:
        print("error: no chromium or google-chrome on this machine", file=sys.stderr)
        return 1
    first, *others = options.runs
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder) / "profile") as page:
        report = write_page([read_run(first)], Path(folder) / "report.html").as_uri()
        show(page, report, "light", ["Loss", "Balance", "Expert load"])
        save(page, options.output / "demo.png")
        show(page, report, "dark", ["Loss", "Gate", "Expert load"])
        read_values(page, "Loss: Loss", 12)
        save(page, options.output / "run/report_dark.png")
        if others:
            comparison = write_page([read_run(it) for it in others], Path(folder) / "comparison.html")
            show(page, comparison.as_uri(), "light", ["Over seeds", "Loss", "Routing"])
            read_values(page, "Loss: Validation loss", 3)
            save(page, options.output / "run/report_seeds.png")
    return 0


def show(page: Page, url: str, scheme: str, titles: Sequence[str]) -> None:
    """Open a page with some of its sections, all drawn."""
    page.show(WIDTH, 900, scheme)
    page.open(url)
    page.wait_for("typeof Plotly !== 'undefined' && content !== null")
    page.run(f"({KEEP})({list(titles)})")
    page.run("Promise.all(places().filter((it) => it.offsetWidth > 0).map(draw)).then(() => 1)")


def read_values(page: Page, plot: str, steps: int) -> None:
    """Show the values at a record, as a pointer does."""
    points = f"[{{curveNumber: 0, pointNumber: {steps}}}]"
    page.run(f"Plotly.Fx.hover(document.getElementById({plot!r}), {points}), true")


def save(page: Page, path: Path) -> None:
    """Save the whole page as a small PNG."""
    time.sleep(1)  # until hover labels have faded in
    high = page.run("Math.ceil(document.querySelector('main').getBoundingClientRect().height)")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": high, "scale": 1}
    answer = page.send("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    picture = Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
