"""Octavo: paged grouped-query attention for LLM serving, in pure Python."""

from octavo.api import BatchAttention, attend, run
from octavo.append import append
from octavo.cascade import CascadeAttention, cascade
from octavo.kv_cache import PagedKV
from octavo.merge import merge
from octavo.problem import AttentionSpec, PagedBatch

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BatchAttention",
    "CascadeAttention",
    "PagedBatch",
    "PagedKV",
    "append",
    "attend",
    "cascade",
    "merge",
    "run",
]
