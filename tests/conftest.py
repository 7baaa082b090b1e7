import functools

import pytest
import torch
from inputs import cpu_backends, devices

import tilewise
from tilewise import repeated
from tilewise.backends import bands, flash, products, tiles


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows and 32 keys, so that small inputs have many."""
    for name in ("TILE_SCORES", "TILE_SCORES_IN_BAND"):
        monkeypatch.setattr(tiles, name, 16 * 32)
    for name in ("ROWS", "ROWS_IN_BAND"):
        monkeypatch.setattr(tiles, name, 16)
    monkeypatch.setattr(bands, "ROWS", 4)
    monkeypatch.setattr(products, "CONVERTED", 256)
    monkeypatch.setattr(flash, "serves", lambda problem: False)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    repeated.forget()  # tests change what backends do


@pytest.fixture(params=devices())
def device(request):
    """Tests of what PyTorch and others do around an operator run where tensors can be."""
    return request.param


@pytest.fixture(params=cpu_backends())
def backend(request):
    """Each backend that serves a plain call on CPU tensors."""
    return request.param


@pytest.fixture
def attend(backend):
    """`attention` on each such backend, with lse."""
    return functools.partial(tilewise.attention, return_lse=True, backend=backend)


@pytest.fixture
def packed(backend):
    """`attention_varlen` on each such backend, with lse."""
    return functools.partial(tilewise.attention_varlen, return_lse=True, backend=backend)


@pytest.fixture
def paged(backend):
    """`attention_paged` on each such backend, with lse."""
    return functools.partial(tilewise.attention_paged, return_lse=True, backend=backend)
