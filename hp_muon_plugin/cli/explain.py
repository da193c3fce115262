"""Hydra's and OmegaConf's errors in one message with the fix."""

import re
from dataclasses import fields, is_dataclass

from hp_muon_plugin.config import data_parallel, optimizer, script, trainer
from hp_muon_plugin.config.options import nearest

ALL_OPTIONS = "`hp-muon train --cfg job` prints every option"
_CLASSES = tuple(
    cls
    for module in (data_parallel, optimizer, script, trainer)
    for cls in vars(module).values()
    if isinstance(cls, type) and is_dataclass(cls)
)
_UNKNOWN_KEY = re.compile(r"Key '([^']+)' (?:is )?not in '([^']+)'")
_UNKNOWN_CHOICE = re.compile(r"Could not find '([^']+)/([^/']+)'")
_FULL_KEY = re.compile(r"^\s*full_key: (\S+)$", re.MULTILINE)
_BAD_VALUE = re.compile(r"^(?:Invalid v|V)alue '(?P<value>.*?)',?(?P<why> .*)$", re.MULTILINE)
_NO_VALUE = re.compile(r"Error parsing override '([^']+)'\s+missing EQUAL")
_COMMAS = re.compile(r"Ambiguous value for argument '([^'=]+)=([^']+)'")
_MERGING = re.compile(r"Error merging override (\S+?)=(.*)")
_GRAMMAR = "basic for details"  # where Hydra's parser sends its readers
_ABSENT_PART = re.compile(r"\+{0,2}(model\.(moe|mla))[.=]")


def explain(error: BaseException, overrides: list[str]) -> str:
    """One readable message.

    Args:
        error: What Hydra or OmegaConf raised.
        overrides: What the user wrote.

    Returns:
        The message, with a line that begins with ``fix:``.
    """
    text = _chain(error)
    unknown = _UNKNOWN_KEY.search(text)
    if unknown:
        return _unknown_key(unknown[1], unknown[2], _full_key(text), overrides)
    value = _BAD_VALUE.search(text)
    if value and _full_key(text):
        return _bad_value(_full_key(text), value["value"], value["why"].strip())
    choice = _UNKNOWN_CHOICE.search(text)
    if choice:
        return _unknown_choice(choice[1], choice[2], text)
    word = _NO_VALUE.search(text)
    if word:
        return f"{word[1]}: is no option with a value\n  fix: write option=value, e.g. run.steps=100"
    commas = _COMMAS.search(text)
    if commas:
        return _commas(commas[1], commas[2])
    merging = _MERGING.search(text)
    if merging and "is not a ListConfig" in text:
        return _no_list(merging[1], merging[2].strip())
    if merging and "incompatible with type hint 'float'" in text:
        return (
            f"{merging[1]}={merging[2].strip()}: has whole numbers among numbers with a point\n  fix: write 2.0 for 2"
        )
    if _GRAMMAR in text:
        option, sign, given = _unreadable(error).partition("=")
        if sign:
            return _unquoted(option, given)
    if "NoneType" in text or "is None" in text:  # OmegaConf's 2.3 and 2.4, for a part of the model that is null
        written = [found for found in map(_ABSENT_PART.match, overrides) if found]
        if written:
            return _absent_part(written[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return "\n".join(dict.fromkeys(kept)) + f"\n  fix: {ALL_OPTIONS} with its value"


def _chain(error: BaseException) -> str:
    texts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        texts.append(str(current))
        current = current.__cause__
    return "\n".join(texts)


def _unreadable(error: BaseException) -> str:
    """The override that Hydra's parser gave up on."""
    current: BaseException | None = error
    while current is not None:
        if getattr(current, "override", None):
            return str(current.override)  # type: ignore[attr-defined]
        current = current.__cause__
    return ""


def _full_key(text: str) -> str:
    found = _FULL_KEY.search(text)
    return found[1] if found else ""


def _bad_value(option: str, value: str, why: str) -> str:
    choices = re.search(r"expected one of \[(.*)\]", why)
    if choices:
        guess = nearest(value, choices[1].split(", "))
        fix = f"did you mean {option}={guess}?" if guess else f"choose among {choices[1]}"
        return f"{option}={value}: there is no such choice, expected one of [{choices[1]}]\n  fix: {fix}"
    fix = f"write a value of that kind; {ALL_OPTIONS} with its value"
    return f"{option}={value}: this value {why}\n  fix: {fix}"


def _unknown_key(key: str, owner: str, full_key: str, overrides: list[str]) -> str:
    owners = [cls for cls in _CLASSES if cls.__name__ == owner]
    names = [field.name for cls in owners for field in fields(cls)]
    there = full_key if full_key.endswith(key) else key
    written = next((o for o in overrides if re.search(rf"(^|\.){re.escape(key)}=", o)), there)
    guess = nearest(key, names)
    if guess:
        fix = f"did you mean {written.partition('=')[0].removesuffix(key)}{guess}?"
    else:
        fix = f"options there are: {', '.join(names)}" if names else ALL_OPTIONS
    return f"{written}: there is no such option\n  fix: {fix}"


def _commas(option: str, value: str) -> str:
    return (
        f"{option}={value}: has commas, which make a list, a text or several runs\n"
        f"  fix: write '{option}=\"{value}\"' for a text, {option}=[{value}] for a list, "
        "or add -m to run each of them"
    )


def _no_list(option: str, value: str) -> str:
    has_rows = value.startswith("[")
    example = f"{option}=[[3.0,-4.0,2.0]], one row for each step" if has_rows else f"'{option}=[{value}]'"
    return f"{option}={value}: needs a list{' of rows' if has_rows else ''}\n  fix: write {example}"


def _unquoted(option: str, value: str) -> str:
    return (
        f"{option}={value}: cannot be read: spaces, signs and letters outside ASCII need quotes of their own\n"
        f"  fix: write '{option}=\"{value}\"'"
    )


def _absent_part(found: re.Match[str]) -> str:
    part, name = found[1], found[2]
    return (
        f"{found.string}: the chosen model has no {part}, so nothing in it can be set\n"
        f"  fix: start from a model that has it, model=tiny_{name}, and set its options "
        f"({part}=null takes it out again)"
    )


def _unknown_choice(group: str, name: str, text: str) -> str:
    listed = re.search(r"Available options in '[^']+':\n((?:\s+\S+\n?)+)", text)
    available = [item for item in (listed[1].split() if listed else []) if not item.endswith("_schema")]
    guess = nearest(name, available)
    fix = f"did you mean {group}={guess}?" if guess else f"choose among {', '.join(available)}"
    return f"{group}={name}: there is no such choice (there are: {', '.join(available)})\n  fix: {fix}"
