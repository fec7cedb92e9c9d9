"""Fixtures of all tests. Octavo's internals are imported under jaxtyping's checker, so shape annotations are tested."""

from jaxtyping import install_import_hook

# Not the public modules: a wrong argument must meet octavo's own error, which says how to fix it, before this one.
CHECKED_MODULES = ("octavo.backends", "octavo.ops", "octavo.reference")
install_import_hook(CHECKED_MODULES, "beartype.beartype")

import importlib.util  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from interpreting import speed_up  # noqa: E402
from targets import Target, targets  # noqa: E402

torch.set_num_threads(1)  # Small tensors: threads cost more than they give, all the more beside other processes.
hypothesis.settings.register_profile("octavo", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("octavo")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    speed_up()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", type=int, metavar="N", help="run at most N of a test's parameters, always the same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sample") is not None:
        keep_sample(config, items, config.getoption("--sample"))
    if torch.cuda.is_available():
        return
    if "sweep" not in (config.getoption("-m") or ""):
        for item in items:
            if item.get_closest_marker("sweep"):
                item.add_marker(pytest.mark.skip(reason="one more of its kind: runs with -m sweep, and on a GPU"))
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none here")
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("heavy"):
            item.add_marker(skip)


def keep_sample(config: pytest.Config, items: list[pytest.Item], size: int) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {x for name, group in tests.items() for x in random.Random(name).sample(group, min(size, len(group)))}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.fixture(params=targets())
def backend(request: pytest.FixtureRequest) -> Target:
    """Each backend that can run here, with its device."""
    return request.param
