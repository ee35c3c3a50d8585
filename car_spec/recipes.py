"""Recipes: YAML files with the values of flags, shipped or the user's own."""

from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parent / "configs"


def read_recipe(name: str) -> dict[str, Any]:
    """A recipe's values, by flag name; those of the recipe it `extends` where it has none of its own."""
    import yaml

    path = Path(name)
    if not path.exists():
        path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
        if not path.exists():
            known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.yaml")))
            raise ValueError(f"--config {name}: there is no such file, and the shipped recipes are {known}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} holds a {type(values).__name__}, not names with values")
    values = {key.replace("-", "_"): value for key, value in values.items()}
    return read_recipe(values.pop("extends")) | values if "extends" in values else values


def recipe_flags(name: str, command: str, allowed: set[str]) -> list[str]:
    """A recipe as flags: evaluate takes its section `evaluate` and the number of images, generate all but that section.

    Unknown names are refused, so that a misspelt one cannot pass in silence.
    """
    values = read_recipe(name)
    section = values.pop("evaluate", None) or {}
    if not isinstance(section, dict):
        raise ValueError(f"--config {name} has evaluate: {section}, not names with values")
    if command == "evaluate":
        section = {key.replace("-", "_"): value for key, value in section.items()}
        values = {key: value for key, value in values.items() if key == "num_images"} | section
    unknown = sorted(set(values) - allowed)
    if unknown:
        raise ValueError(f"--config {name} has {', '.join(unknown)}, which {command} does not know")
    flags: list[str] = []
    for key, value in values.items():
        if key == "aligned" and value is False:
            flags.append("--no-aligned")
        elif key == "prompt":
            flags += [f"--prompt={text}" for text in (value if isinstance(value, list) else [value])]
        elif value is not None and value is not False:
            given = [] if value is True else value if isinstance(value, list) else [value]
            flags += [f"--{key.replace('_', '-')}", *map(str, given)]
    return flags
