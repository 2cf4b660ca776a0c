"""Pickles functions and classes of the user's own modules by value: ranks need not have them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

from alchemist_ray.errors import BadArgumentError
from alchemist_ray.tracebacks import is_users_own

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

_registry = threading.RLock()
_inspected: set[str] = set()  # modules by name
_own: set[str] = set()  # those that are the user's


def require_cloudpickle() -> None:
    """Raise `BadArgumentError` where functions cannot be pickled."""
    if cloudpickle is None:
        raise BadArgumentError(
            "functions are sent with cloudpickle, which is not installed here: pip install "
            "cloudpickle"
        )


@contextlib.contextmanager
def by_value() -> Iterator[None]:
    """A context in which cloudpickle copies the user's own modules into the pickle."""
    with _registry:
        for name in sys.modules.keys() - _inspected:
            module = sys.modules.get(name)
            if (
                isinstance(module, ModuleType)
                and module.__name__ == name != "__main__"
                and is_users_own(name, getattr(module, "__file__", None))
            ):
                _own.add(name)
            _inspected.add(name)
        known = cloudpickle.list_registry_pickle_by_value()
        own = [sys.modules[name] for name in _own - known if name in sys.modules]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)
