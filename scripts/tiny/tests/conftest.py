"""The recipe's tests share the set-up of the others; `make test-recipe` runs them."""

from tests.conftest import golden, pytest_collection_modifyitems, pytest_sessionstart

__all__ = ["golden", "pytest_collection_modifyitems", "pytest_sessionstart"]
