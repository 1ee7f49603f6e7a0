"""Which of the tasks that a lane saw waiting it tries, and in what order."""

from __future__ import annotations

from typing import Any

from pgtask_sa.listed import MARGIN, Listed

A, B = (0, "A"), (0, "B")


def rows_of(count: int, kind: str = "A", first: int = 1, due: float | None = None) -> list[Any]:
    """Return what a look finds; planned ones fell due one second after the other."""
    return [
        {"task_id": n, "level": 0, "kind": kind, "due": None if due is None else due + n}
        for n in range(first, first + count)
    ]


def listed(*rows: Any, batch_size: int = 1) -> Listed:
    """Return what a lane knows after a look."""
    known = Listed(batch_size)
    known.replace([row for each in rows for row in each])
    return known


def test_some_of_many_by_chance() -> None:
    """Of a thousand a claim tries some, and lanes try different ones."""
    found = [tuple(listed(rows_of(1000)).choose([A], new_first=True)) for _ in range(2)]
    assert [MARGIN + 2] * 2 == list(map(len, found))
    assert found[0] != found[1]


def test_pairs_in_their_order() -> None:
    """Those of the first pair come first, and of a pair that is not asked for comes none."""
    known = listed(rows_of(3), rows_of(3, "B", 11), rows_of(3, "C", 21))
    found = known.choose([B, A], new_first=True)
    assert [{11, 12, 13}, {1, 2, 3}] == [set(found[:3]), set(found[3:])]


def test_planned_ones_by_time() -> None:
    """Of the planned ones those that fell due first; before or behind the new ones."""
    known = listed(rows_of(2), list(reversed(rows_of(3, first=11, due=0.0))))
    assert [11, 12, 13] == known.choose([A], new_first=False)[:3]
    assert [11, 12, 13] == known.choose([A], new_first=True)[2:]


def test_what_was_taken_is_not_tried_again() -> None:
    """Nor, until the next look, what a claim has tried in vain."""
    known = listed(rows_of(3))
    known.choose([A], new_first=True)
    assert set() == known.took(rows_of(1, first=2))
    assert {1, 3} == set(known.choose([A], new_first=True))
    assert set() == known.took([])
    assert [] == known.choose([A], new_first=True)


def test_more_is_tried_if_all_was_in_vain() -> None:
    """A few claims go through all that there was, also through a thousand."""
    known, tried = listed(rows_of(1000)), set()
    claims = 0
    left = {A}
    while left:
        tried |= set(known.choose([A], new_first=True))
        left = known.took([])
        claims += 1
    assert (1000, True) == (len(tried), claims <= 4)


def test_what_somebody_holds_comes_last() -> None:
    """Tasks that were tried in vain and are still there run elsewhere: others are tried first."""
    known = listed(rows_of(20), batch_size=1)
    known.choose([A], new_first=True)
    known.took([])
    known.replace(rows_of(25))
    assert set(range(21, 26)) == set(known.choose([A], new_first=True)[:5])
    known.replace(rows_of(5, first=21))
    known.replace(rows_of(25))  # it was gone meanwhile: so it is a task like others
    assert set(range(21, 26)) != set(known.choose([A], new_first=True)[:5])
