"""flashinfer.prefill: several queries a sequence. LSE in base 2."""

from octavo.compat.flashinfer.paged import BatchPrefillWithPagedKVCacheWrapper
from octavo.compat.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from octavo.compat.flashinfer.single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
