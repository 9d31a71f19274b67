"""Invariant: every error class that the rooms raise is found in `mmgraph.errors`, and each name means one class."""

import inspect

import mmgraph.capture.errors
import mmgraph.errors
import mmgraph.ops.errors


def classes(module: object) -> dict[str, type[Exception]]:
    return {
        name: found
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, Exception) and found.__module__ == module.__name__  # type: ignore[attr-defined]
    }


def test_no_name_is_in_two_rooms_and_all_are_handed_out() -> None:
    rooms = [classes(mmgraph.errors), classes(mmgraph.capture.errors), classes(mmgraph.ops.errors)]
    names = [name for room in rooms for name in room]
    assert len(names) == len(set(names))
    for room in rooms:
        for name, found in room.items():
            assert getattr(mmgraph.errors, name) is found
            assert found.__doc__
