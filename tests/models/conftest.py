"""The real model, once for each file that runs it."""

import pytest

from gumbeljax import models
from tests.models.golden import smollm2_path


@pytest.fixture(scope="module")
def loaded():
    return models.load(smollm2_path())
