"""Names for the tensor shapes of the contract. With jaxtyping installed they are checkable; without, plain `Tensor`."""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int
else:
    try:
        from jaxtyping import Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: object) -> type:
                return Tensor

        Float = Int = _Unchecked

Queries = Float[Tensor, "tokens qo_heads head_dim"]
KeyCache = Float[Tensor, "pages page_size kv_heads head_dim"]
ValueCache = Float[Tensor, "pages page_size kv_heads value_dim"]
NewKeys = Float[Tensor, "tokens kv_heads head_dim"]
NewValues = Float[Tensor, "tokens kv_heads value_dim"]
Output = Float[Tensor, "tokens qo_heads value_dim"]
LogSumExp = Float[Tensor, "tokens qo_heads"]
Indptr = Int[Tensor, "sequences_plus_one"]
PerSequence = Int[Tensor, "sequences"]
PageIds = Int[Tensor, "entries"]
BlockTable = Int[Tensor, "sequences max_pages"]

__all__ = [
    "BlockTable",
    "Float",
    "Indptr",
    "Int",
    "KeyCache",
    "LogSumExp",
    "NewKeys",
    "NewValues",
    "Output",
    "PageIds",
    "PerSequence",
    "Queries",
    "Tensor",
    "ValueCache",
]
