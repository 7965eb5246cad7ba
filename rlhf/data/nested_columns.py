"""Columns inside columns: `question.full_text` and `answers.0.text` become columns of their own.

Records and the names that the settings give go in; the same records, the values that these names reach beside the
columns that hold them, come out. A column that is called so, dot and all, wins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlhf.data.drop_reasons import kind_of
from rlhf.errors import DataError

Values = dict[str, Any]
_MOST = 12  # keys of an object that are named


def lay_flat(
    records: Sequence[Values | None], found: Collection[str], names: Mapping[str, str], source: str
) -> list[Values | None]:
    """The records with a column for each nested one in `names`; absent where a record does not reach it.

    Args:
        records: None for one that cannot be read.
        found: the columns of the source.
        names: key of the settings -> the column that it names.

    Raises:
        DataError: no record has such a column; it says what is there instead.
    """
    nested = {name: name.split(".") for name in names.values() if name not in found and name.split(".")[0] in found}
    if not nested:
        return list(records)
    flat: list[Values | None] = []
    reached = set()
    for record in records:
        if record is None:
            flat.append(None)
            continue
        values = dict(record)
        for name, parts in nested.items():
            there, value = _follow(record, parts)
            if there:
                reached.add(name)
                values[name] = value
        flat.append(values)
    for key, name in names.items():
        if name in nested and name not in reached:
            whole = (record for record in records if record is not None)
            holder = next((record for record in whole if record.get(nested[name][0]) is not None), {})
            raise DataError(f"{source}: no column {name!r} ({key}); {_instead(holder, nested[name])}")
    return flat


def _follow(value: Any, parts: Sequence[str]) -> tuple[bool, Any]:
    """(whether the path leads somewhere, what is there)."""
    for part in parts:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list | tuple) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _instead(value: Any, parts: Sequence[str]) -> str:
    """What is found at the last place that the path leads to."""
    at = next(length for length in range(len(parts) - 1, -1, -1) if _follow(value, parts[:length])[0])
    place, (_, held) = ".".join(parts[:at]) or parts[0], _follow(value, parts[:at])
    if isinstance(held, Mapping) and held:
        keys = [str(key) for key in held]
        more = f" and {len(keys) - _MOST} more" if len(keys) > _MOST else ""
        return f"{place} holds {', '.join(keys[:_MOST])}{more}"
    if isinstance(held, list | tuple) and held:
        return f"{place} is a list of {len(held)}, counted from 0"
    if isinstance(held, list | tuple | Mapping):
        return f"{place} is empty"
    return f"{place} is {'text' if isinstance(held, str) else kind_of(held)}"
