"""The page of a study: results.json, and index.md with tables, verdicts, pictures and how it was made."""

import json
from pathlib import Path
from typing import Any

from megamoe.apps.lab.claims import beyond, paired
from megamoe.apps.lab.measures import crossing, tokens_at
from megamoe.apps.lab.pictures import draw
from megamoe.apps.lab.plan import Plan
from megamoe.apps.lab.results import stored_values
from megamoe.apps.lab.verdicts import interval
from megamoe.io import replace_file
from megamoe.metrics.formats import format_count

PAGE, RESULTS = "index.md", "results.json"
IN_BRACKETS = "; in brackets the paper's number"
Table = list[list[str]]


def write_results(plan: Plan, results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the page's files; return their paths.

    Raises:
        OSError: if one cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw(plan, results, folder)
    text = markdown(plan, results, [path.name for path in pictures])
    written = {folder / RESULTS: json.dumps(results, indent=1, allow_nan=True) + "\n", folder / PAGE: text}
    for path, content in written.items():
        replace_file(path, content.encode(errors="backslashreplace"))
    return [*written, *pictures]


def markdown(plan: Plan, results: dict[str, Any], pictures: list[str]) -> str:
    """Return index.md."""
    study, made = plan.study, results["made"]
    seeds = ", ".join(map(str, results["seeds"]))
    source = f"{study.source}. " if study.source else ""
    parts = [f"# {study.title}", f"{source}Size `{results['size']}`, seeds {seeds}.", study.question]
    parts.append(f"```\n{made['command']}\n```")
    if results["claims"]:
        parts += ["## Claims", markdown_table(claims_table(plan, results)), _rule(plan)]
    parts += study.remarks
    parts += ["## Numbers", markdown_table(rows_table(plan, results)), _legend(plan, results)]
    parts += _compared(plan, results)
    if results.get("unrecorded"):
        parts.append("\n".join(f"- {line}" for line in results["unrecorded"]))
    others = paper_table(results)
    if len(others) > 1:
        parts += ["## Numbers of the paper that are not measured here", markdown_table(others)]
    parts += [f"![{name.removesuffix('.svg')}]({name})" for name in pictures]
    failed = [line for row in results["rows"].values() for line in row["failed"]]
    if failed:
        parts += ["## Failed runs", "\n".join(f"- {line}" for line in failed)]
    parts += ["## How it was made", _tuning(results), study.differs, _differences(plan), _sizes(results)]
    libraries = ", ".join(f"{name} {found}" for name, found in made["libraries"].items())
    parts.append(
        f"{made['date']}, megamoe {made['megamoe']}, Python {made['python']}, {libraries}. "
        f"{made['processor']}. "
        f"Planned time of this size: {plan.size.time}."
    )
    parts.append(
        f"`{RESULTS}` has each seed's numbers and a digest of each row's configuration. The command above "
        "with `--power` and its path says what more seeds would show."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _compared(plan: Plan, results: dict[str, Any]) -> list[str]:
    """Return the differences from the control, the rows beyond a bound, and where curves cross."""
    control, parts = plan.study.control, []
    if control in results["rows"]:
        parts = [f"## Differences from {control}", markdown_table(control_table(plan, results))]
        parts.append(
            f"A row's number minus that of {control}, paired by seed: the mean, and in brackets its 95 % "
            "interval (Student's t). Each interval misses the true mean in 5 % of cases, so among many some "
            "leave out 0 by chance."
        )
    if unequal := beyond([*results["rows"]], stored_values(results), plan.study.bounds):
        parts.append(f"Beyond the study's bounds, so not compared by others alone: {'; '.join(unequal)}.")
    crossings = crossing_table(plan, results)
    return [*parts, markdown_table(crossings)] if len(crossings) > 1 else parts


def claims_table(plan: Plan, results: dict[str, Any]) -> Table:
    """Return a row for each comparison of each claim."""
    level = f"{100 * (1 - plan.size.alpha):.4g} %"
    rows = [["claim", "comparison", "difference", f"{level} interval", "seeds", "verdict"]]
    for claim in results["claims"]:
        place = f" ({claim['place']})" if claim["place"] else ""
        for index, found in enumerate(claim["comparisons"]):
            text = f"{claim['text']}{place}" if index == 0 else ""
            span = "" if found["low"] is None else f"{number(found['low'])} to {number(found['high'])}"
            mean = "" if found["mean"] is None else number(found["mean"])
            seeds = f"{len(found['differences'])} of {len(results['seeds'])}"
            verdict = shown_verdict(found["verdict"], [found])
            rows.append([text, f"`{found['text']}`", mean, span, seeds, verdict])
    return rows


def shown_verdict(verdict: str, comparisons: list[dict[str, Any]]) -> str:
    """Return a verdict as tables have it: what contradicts the claim stands out, and the others say why."""
    deciding = [found for found in comparisons if found["verdict"] == verdict]
    if verdict == "undecided":
        return f"undecided: {'; '.join(dict.fromkeys(found['reason'] for found in deciding))}"
    if verdict == "equal":
        margins = dict.fromkeys(f"{found['margin']:.3g}" for found in deciding)
        return f"equal within {' and '.join(margins)}"
    return "**opposite**" if verdict == "opposite" else verdict


def control_table(plan: Plan, results: dict[str, Any]) -> Table:
    """Return a row for each row but the control: its differences from the control, with their intervals."""
    control, values = plan.study.control or "", stored_values(results)
    rows = [["row", *plan.study.compared]]
    for name in results["rows"]:
        cells = [name]
        for measure in plan.study.compared:
            differences = paired(values[measure][name], values[measure][control])
            mean, low, high = interval([*differences.values()])
            digits = plan.study.measures[measure].digits + 1
            cell = "" if mean is None else number(mean, digits)
            if low is not None and high is not None:
                cell += f" ({number(low, digits)} to {number(high, digits)})"
            count, seeds = len(differences), len(results["seeds"])
            cells.append(cell + (f", {count} of {seeds} seeds" if 0 < count < seeds else ""))
        if name != control:
            rows.append(cells)
    return rows


def crossing_table(plan: Plan, results: dict[str, Any]) -> Table:
    """Return for each other row than a curve's `crossing` from which tokens on it stays below that row's."""
    rows = [["curve", "row", "ahead from this many tokens on"]]
    for name, curve in plan.study.curves.items():
        of_rows = results["curves"].get(name, {})
        for row, points in of_rows.items() if curve.crossing in of_rows else ():
            step = crossing(points, of_rows[curve.crossing])
            tokens = "" if step is None else format_count(tokens_at(results, row, points, step))
            if row != curve.crossing:
                rows.append([name, row, tokens or "never"])
    return rows


def rows_table(plan: Plan, results: dict[str, Any]) -> Table:
    """Return a row for each row: mean ± standard deviation, and the paper's number in brackets."""
    measures = plan.study.measures
    tuned = results["tuning"]
    rows = [["row", *measures, *([tuned["key"]] if tuned else [])]]
    for name, row in results["rows"].items():
        cells = [name]
        for measure, found in row["measures"].items():
            is_failed = found["mean"] is None and row["failed"]
            cell = "failed" if is_failed else _spread(found, measures[measure].digits)
            published = row["published"].get(measure)
            cells.append(cell + ("" if published is None else f" [{published:g}]"))
        rows.append(cells + ([str(row.get("tuned", ""))] if tuned else []))
    return rows


def paper_table(results: dict[str, Any]) -> Table:
    """Return a row for each row of which the paper has numbers that the study does not measure."""
    names = list(dict.fromkeys(name for row in results["rows"].values() for name in row["paper"]))
    rows = [["row", *names]]
    for name, row in results["rows"].items():
        if paper := row["paper"]:
            rows.append([name, *(f"{paper[each]:g}" if each in paper else "" for each in names)])
    return rows


def _legend(plan: Plan, results: dict[str, Any]) -> str:
    texts = {name: each.text for name, each in plan.study.measures.items()}
    texts |= {name: plan.study.rows[name].text for name in plan.configs}
    lines = [f"- `{name}`: {text}" for name, text in texts.items() if text]
    has_published = any(row["published"] for row in results["rows"].values())
    told = f"Mean ± standard deviation over the seeds{IN_BRACKETS * has_published}."
    return "\n".join([told, "", *lines]).rstrip()


def _differences(plan: Plan) -> str:
    """Return the rows' `differences` from their papers, each with the rows that have it."""
    rows_of: dict[str, list[str]] = {}
    for row in plan.configs:
        for text in plan.differences[row]:
            rows_of.setdefault(text, []).append(row)
    lines = [
        f"- {text}" + (f" ({', '.join(rows)})" if len(rows) < len(plan.configs) else "")
        for text, rows in rows_of.items()
    ]
    return "\n".join(
        ["From the published models, the configurations differ in this:", "", *lines] if lines else []
    )


def _sizes(results: dict[str, Any]) -> str:
    """Return the numbers of parameters and tokens of the rows, the smallest and the largest."""
    told = []
    for key, text in (("parameters", "Parameters of a model"), ("tokens", "tokens of its training")):
        known = [row[key] for row in results["rows"].values() if row.get(key)]
        if known:
            ends = dict.fromkeys(format_count(it) for it in (min(known), max(known)))
            told.append(f"{text}: {' to '.join(ends)}")
    return f"{'; '.join(told)}." if told else ""


def _rule(plan: Plan) -> str:
    if len(plan.size.seeds) < 2:
        return "One seed has no interval and decides nothing."
    told = (
        "A difference is the side that should be larger minus the other, paired by seed. A claim is equal if "
        "two one-sided t tests of 5 % say that the mean lies within its margin, else seen if the interval of "
        "the mean (Student's t) lies above 0, and opposite if it lies below 0. Else it is undecided, and so "
        "many seeds more would decide it in 80 % of cases, if this mean and spread were the true ones."
    )
    if looks := plan.size.looks:
        told = told.replace("of 5 %", f"of {100 * plan.size.alpha:.4g} %")
        told += (
            f" The claims are judged after {', '.join(map(str, looks))} seeds, until all are decided. The "
            "looks share an error of 5 % (Lan and DeMets's spending, like O'Brien and Fleming)."
        )
    return told


def _tuning(results: dict[str, Any]) -> str:
    rule = results["tuning"]
    if rule is None:
        return "Nothing was tuned: every row has the settings of the study."
    tried = rule["values"]
    if all(isinstance(value, int | float) for value in tried):
        tried = sorted(tried)
    values = ", ".join(map(str, tried))
    if rule.get("rows") is None:
        told = f"One rule for all rows: `{rule['key']}` is that of {values} whose run of seed {rule['seed']}"
        lowest = "lowest"
    else:
        tuned = " and ".join(rule["rows"])
        told = (
            f"All rows have one `{rule['key']}`: that of {values} whose runs of {tuned}, seed {rule['seed']},"
        )
        lowest = "lowest mean" if len(rule["rows"]) > 1 else "lowest"
    told += f" ended with the {lowest} `{rule['by']}`, on data that the table does not report"
    told += f", except in {', '.join(rule['reported'])}." if rule.get("reported") else "."
    lost = [line for row in results["rows"].values() for line in row.get("tuning_failed", [])]
    if lost:
        told += f" Without the runs that failed: {'; '.join(dict.fromkeys(lost))}."
    ends = (tried[0], tried[-1])
    at_end = [name for name, row in results["rows"].items() if row.get("tuned") in ends]
    if at_end:
        of_rows = "." if rule.get("rows") is not None else f": {', '.join(at_end)}."
        told += f" The best one may lie beyond them, because the first or last was taken{of_rows}"
    return told


def _spread(found: dict[str, Any], digits: int) -> str:
    if found["mean"] is None:
        return ""
    mean = number(found["mean"], digits)
    return mean if found["std"] is None else f"{mean} ± {number(found['std'], digits)}"


def number(value: float, digits: int = 4) -> str:
    """Return a number as tables have it."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def markdown_table(rows: Table) -> str:
    """Return a table in Markdown, the first row as its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
