"""What a remembered method keeps, and for how long."""

import gc
import weakref
from dataclasses import dataclass, field

from rlhfuse.base.remembered import remembered


@dataclass(frozen=True)
class Squares:
    asked: list = field(default_factory=list, compare=False)

    @remembered
    def of(self, number):
        """Its square."""
        self.asked.append(number)
        if number < 0:
            raise ValueError(number)
        return number * number


def test_equal_arguments_compute_once_for_each_object():
    squares = Squares()
    assert [squares.of(3), squares.of(3), squares.of(4)] == [9, 9, 16] and squares.asked == [3, 4]
    assert Squares().of(3) == 9 and squares == Squares() and Squares.of.__doc__ == "Its square."


def test_the_object_is_not_kept():
    squares = Squares()
    squares.of(3)
    gone = weakref.ref(squares)
    del squares
    gc.collect()
    assert gone() is None
