from tests.tasks.conftest import cache, filled

__all__ = ["cache", "filled"]
