import pytest
import torch

from tests.tasks import miniatures


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The default cache is an empty folder, and `fetch` accepts the miniatures."""
    monkeypatch.setenv("FEDFQ_DATA", str(tmp_path / "cache"))
    miniatures.use(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def filled(cache):
    """A default cache with the miniatures in it."""
    cache.mkdir()
    miniatures.write(cache)
    return cache


@pytest.fixture(autouse=True)
def one_thread():
    """Networks this small are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
