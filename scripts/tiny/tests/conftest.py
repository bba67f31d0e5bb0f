"""The recipe's tests share the set-up of the others; `make test-recipe` runs them."""

from tests.conftest import checkpoint_of, golden, pytest_collection_modifyitems, pytest_sessionstart, tiny_folder

__all__ = ["checkpoint_of", "golden", "pytest_collection_modifyitems", "pytest_sessionstart", "tiny_folder"]
