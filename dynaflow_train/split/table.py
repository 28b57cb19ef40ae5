"""Which operator follows which rule. What is not listed here mixes samples."""

from __future__ import annotations

import torch
from torch import fx

from dynaflow_train.split import products as p
from dynaflow_train.split import rules as r

# Elementwise operators that torch does not tag as such.
_POINTWISE = """copy _to_copy masked_fill _conj polar prims.fma hardtanh_backward
leaky_relu_backward elu_backward softplus_backward log_sigmoid_backward"""
_SAME = """detach alias view.dtype view_as_real view_as_complex empty_like
_c10d_functional.all_reduce _c10d_functional.broadcast _c10d_functional.wait_tensor"""
_FIRST_DIM = """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward prims._low_memory_max_pool_with_offsets
prims._low_memory_max_pool_offsets_to_indices"""
_ATTENTION_BACKWARD = """_scaled_dot_product_flash_attention_backward
_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward
_scaled_dot_product_flash_attention_for_cpu_backward"""
_CREATE = "full zeros ones empty rand randn empty_strided new_empty_strided"


def _names(text: str) -> list[str]:
    return [n if "." in n and not n.startswith("view.") else f"aten.{n}" for n in text.split()]


def _table() -> dict[str, r.Rule]:
    table: dict[str, r.Rule] = {}
    for names, rule in (
        (_POINTWISE, r.pointwise),
        (_SAME, r.same),
        (_FIRST_DIM, p.first_dim),
        (_ATTENTION_BACKWARD, p.attention_backward),
        (_CREATE, r.create),
        ("full_like zeros_like ones_like", r.filled_like),
        ("view _unsafe_view", r.reshape),
        ("as_strided", r.as_strided),
        ("expand", r.expand),
        ("repeat", r.repeat),
        ("permute transpose t", r.permute),
        ("unsqueeze", r.unsqueeze),
        ("squeeze", r.squeeze),
        ("select unbind", r.select),
        ("slice", r.slice_),
        ("split split_with_sizes", r.split),
        ("cat", r.cat),
        ("mm bmm addmm baddbmm", p.matmul),
        ("convolution", p.convolution),
        ("convolution_backward", p.convolution_backward),
        ("linalg_solve_triangular", p.matrices),
        ("embedding", p.embedding),
        ("embedding_dense_backward", p.embedding_backward),
        ("index _unsafe_index", p.index),
        ("index_put _unsafe_index_put", p.index_put),
        ("_unsafe_masked_index_put_accumulate", p.masked_index_put),
        ("native_dropout bernoulli rand_like randn_like", r.random_like),
        ("dynaflow.forked_dropout", r.random_like),
        ("_softmax _log_softmax cumsum cumprod logcumsumexp gather", r.along(1)),
        ("scatter scatter_add scatter_reduce", r.along(1)),
        ("_softmax_backward_data _log_softmax_backward_data", r.along(2)),
        ("sort", r.along(1)),
        ("topk", r.along(2)),
        ("flip prims.rev", r.along(1, "dims")),
        ("roll", r.along(2, "dims", None)),
        ("slice_scatter select_scatter", r.scatter_slice),
        ("constant_pad_nd", r.pad),
        ("sum", r.reduction(sums=True)),
        ("mean amax amin any all argmax argmin prod logsumexp max min", r.reduction()),
        ("var std var_mean", r.reduction(keepdim_index=3)),
        ("linalg_vector_norm", r.reduction(2, 3)),
        ("_c10d_functional.all_gather_into_tensor", p.all_gather),
        ("_c10d_functional.reduce_scatter_tensor", p.reduce_scatter),
        ("_c10d_functional.all_to_all_single", p.all_to_all),
        ("dynaflow.sort_pairs dynaflow.sort_rows", p.to_rows),
        ("dynaflow.unsort_rows", p.from_rows),
        ("dynaflow.grouped_wgrad", p.sum_of_rows),
    ):
        table.update(dict.fromkeys(_names(names), rule))
    return table


class Rules:
    """Finds the rule of a node."""

    def __init__(self) -> None:
        self._table = _table()

    def find(self, node: fx.Node) -> r.Rule | None:
        """The node's rule; None when its operator is unknown."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return None
        name = f"{target.namespace}.{packet_name(node)}"
        if (rule := self._table.get(f"{name}.{target._overloadname}")) is not None:
            return rule
        tensors = all(str(result.type) == "Tensor" for result in target._schema.returns)
        if torch.Tag.pointwise in target.tags and tensors:  # `equal` is tagged too
            return r.pointwise
        return self._table.get(name)


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators (by packet name) whose integer arguments are sizes: they shrink with the micro-batch.
SIZE_OPERATORS = _set(
    "view reshape _unsafe_view expand full zeros ones empty rand randn slice split "
    "split_with_sizes empty_strided new_empty_strided as_strided"
)
# Operators with a rule of their own for rows (`rows.py`); any other makes rows of rows.
ROW_OPERATORS = _set("sort_rows unsort_rows grouped_wgrad")
# Operators that only look at their input: they are copied into every op that reads them.
VIEWS = _set(
    "view reshape _unsafe_view expand permute transpose t unsqueeze squeeze select slice alias "
    "detach split split_with_sizes unbind view_of lift_fresh view_as_real view_as_complex"
)
# Operators through which a sum over micro-batches may pass.
LINEAR = _set(
    "view reshape _unsafe_view permute transpose t unsqueeze squeeze select slice alias detach "
    "clone neg sum expand convert_element_type _to_copy split split_with_sizes"
)


def packet_name(node: fx.Node) -> str:
    """`mm` for `aten.mm.default`; the target's own name for anything else."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))
