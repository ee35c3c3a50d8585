"""Scores of several folders as tables and as JSON."""

from typing import Any

from car_spec.eval.intervals import FLOOR, STANDARD_ERRORS, Comparison, Interval

MEANING = f"± {STANDARD_ERRORS} standard errors, about a 95 % interval for how much other images from the same sampler would move it"


def as_json(scores: dict[str, dict[str, float]], counts: dict[str, int], comparison: Comparison, context: dict[str, Any]) -> dict[str, Any]:
    """Everything a score needs beside it."""

    def of(intervals: dict[str, Interval]) -> dict[str, Any]:
        return {name: {"mean": i.mean, "standard error": i.error, "interval": i.ends} for name, i in intervals.items()}

    rows = [
        {"folder": folder, "images": counts[folder], "scores": values, "on subsets": of(comparison.scores[folder])}
        | ({"difference from the first folder": of(comparison.differences[folder])} if folder in comparison.differences else {})
        for folder, values in scores.items()
    ]
    subsets = {"images": comparison.size, "draws": comparison.draws, "interval": MEANING}
    floor = {FLOOR: of(comparison.scores[FLOOR])} if FLOOR in comparison.scores else {}
    return {"context": context, "results": rows, "subsets": subsets | floor}


def print_tables(scores: dict[str, dict[str, float]], counts: dict[str, int], comparison: Comparison, context: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=140)
    columns = list(next(iter(scores.values())))

    def show(title: str, rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(("folder", "images", *columns)):
            table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def cells(intervals: dict[str, Interval]) -> list[str]:
        shown = [intervals.get(column) for column in columns]
        return ["" if i is None else f"{i.mean:.4f} ± {STANDARD_ERRORS * i.error:.4f}" for i in shown]

    size = str(comparison.size)
    show("all images", [[name, str(counts[name]), *(f"{values[c]:.4f}" for c in columns)] for name, values in scores.items()])
    show(
        f"{size} images of each, mean of {comparison.draws} random draws; {MEANING}",
        [[name, size, *cells(intervals)] for name, intervals in comparison.scores.items()],
    )
    if comparison.differences:
        show(
            f"difference from {next(iter(scores))} on these draws (paired: {', '.join(comparison.paired) or 'none'})",
            [[name, size, *cells(intervals)] for name, intervals in comparison.differences.items()],
        )
    if FLOOR not in comparison.scores:
        console.print("no floor: it needs real images (--real-images, or a folder as --reference)", highlight=False)
    for name, value in context.items():
        if isinstance(value, dict):
            console.print(f"{name}:", highlight=False)
            for key, one in value.items():
                console.print(f"  {key}: {one}", highlight=False, soft_wrap=True)
        else:
            console.print(f"{name}: {value}", highlight=False, soft_wrap=True)
