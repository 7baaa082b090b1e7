import pytest
import torch

from tilewise.backends import tiled


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 8 rows and 16 keys, so that small inputs have many."""
    for name in ("TILE_SCORES", "TILE_SCORES_IN_BAND"):
        monkeypatch.setattr(tiled, name, 8 * 16)
    for name in ("ROWS", "ROWS_IN_BAND"):
        monkeypatch.setattr(tiled, name, 8)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
