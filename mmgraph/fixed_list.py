"""Lists that are read like any other and changed only by assigning a new one.

Promises: equal to a list, or a tuple, of the same values; every method that would change it in place raises,
since what was made from it would not notice. Imports no torch.
"""

from typing import Any, Generic, NoReturn, TypeVar

from mmgraph.errors import InputsError

T = TypeVar("T")


class FixedList(list[T], Generic[T]):
    """A list that can't be changed in place.

    Args:
        values: The values.
        remedy: What to write instead, for the error.
    """

    __slots__ = ("_remedy",)
    __hash__ = None

    def __init__(self, values: Any, remedy: str) -> None:
        super().__init__(values)
        self._remedy = remedy

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, list(other) if isinstance(other, tuple) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (tuple(self), self._remedy)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InputsError(f"this list can't be changed in place; assign a new one: {self._remedy}")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
