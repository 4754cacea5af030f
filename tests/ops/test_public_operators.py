"""Every operator room's public functions are ``fastswin.ops``' own."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from fastswin import ops

ROOMS = [room.name for room in pkgutil.iter_modules(ops.__path__)]


@pytest.mark.parametrize("room", ROOMS)
def test_public_functions_of_a_room_are_operators(room):
    """``ops.swin_block`` was the module, not the function, until this asked."""
    module = importlib.import_module(f"fastswin.ops.{room}")
    for name in getattr(module, "__all__", ()):
        if name.endswith("_blocker"):  # reasons against one stay in its room
            continue
        assert name in ops.__all__
        assert getattr(ops, name) is getattr(module, name)


def test_every_public_name_is_callable():
    assert [name for name in ops.__all__ if not callable(getattr(ops, name))] == []
