"""The shape annotations of octavo's internals are live under pytest."""

import pytest
import torch
from jaxtyping import TypeCheckError

from octavo import ops
from octavo.reference import reference


def test_wrong_shape_is_caught_in_reference():
    from inputs import Case, build

    p = build(Case("shape"))
    with pytest.raises(TypeCheckError):
        reference(p.spec, p.q[0], p.kv.k_cache, p.kv.v_cache, p.batch)


def test_dimensions_of_one_name_must_agree():
    p_q, cache = torch.zeros(3, 4, 16), torch.zeros(5, 1, 2, 16)
    from octavo import AttentionSpec, PagedBatch

    spec = AttentionSpec(4, 2, 16, dtype=torch.float32)
    batch = PagedBatch.csr(torch.tensor([0, 3]), torch.tensor([0, 5]), torch.arange(5))
    with pytest.raises(TypeCheckError):
        reference(spec, p_q, cache, torch.zeros(6, 1, 2, 16), batch)


def test_hook_covers_ops_and_backends():
    from octavo.backends import resolve

    with pytest.raises(TypeCheckError):
        ops.pack_batch("not a batch")
    with pytest.raises(TypeCheckError):
        resolve("not a spec", "not an arch")
