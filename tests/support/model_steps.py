"""What rules are made of: when a step is taken, who is meant, what a handler is told."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from model_process import Crashed

picks = st.integers(0, 7)  # one of those that there are


def only_if(condition: Callable[[Any], Any] = lambda _machine: True) -> Callable[..., Any]:
    """Make a step do nothing unless a condition is true.

    A precondition of Hypothesis would leave the rule out. But then what is drawn depends on what
    happened before, which is not the same each time: the server and the threads have their say.
    """

    def decorated(step: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(step)
        def run(self: Any, **given: Any) -> None:
            if not self.is_over and condition(self):
                self.is_new = True
                step(self, **given)

        return run

    return decorated


def pick_of(choices: list[Any], number: int) -> Any:
    """Choose one, whatever the number."""
    return choices[number % len(choices)]


def does(what: Callable[[Any], Any]) -> Callable[[Any], bool]:
    """Make an order after which the handler goes on."""

    def order(session: Any) -> bool:
        what(session)
        return False

    return order


def die(_session: Any) -> bool:
    """Be the handler whose process is dead."""
    raise Crashed
