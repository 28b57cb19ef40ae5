"""The core attention: torch's fused one, or the host's own sums, both traceable.

Host seam (megatron-core 0.19.2): `core/transformer/dot_product_attention.py`
`DotProductAttention.forward`. The host keeps [b, heads, s, s] scores, draws its dropout inside a
fork of the generator (other heads, other masks on each rank; `core/tensor_parallel/random.py`) and
takes its scratch memory from a global buffer; neither can be traced.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from dynaflow_train.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

Kind = Literal["sdpa", "host"]


def define_dropout() -> torch.library.Library:
    """Define `dynaflow::forked_dropout`; it goes when the result is destroyed.

    Its draws are the host's: `native_dropout` within the tracker's fork.
    """
    library = torch.library.Library("dynaflow", "FRAGMENT")
    library.define("forked_dropout(Tensor x, float p) -> (Tensor, Tensor)")

    def draw(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork():
            return torch.native_dropout(x, p, True)

    def shapes(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        del p
        return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

    def save(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.scale = 1 / (1 - inputs[1])

    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return torch.ops.aten.native_dropout_backward(gradient, *ctx.saved_tensors, ctx.scale), None

    library.impl("forked_dropout", draw, "CompositeExplicitAutograd")
    name = "dynaflow::forked_dropout"
    torch.library.register_fake(name, shapes, lib=library)
    torch.library.register_autograd(name, backward, setup_context=save, lib=library)
    return library


def replacement(plain: Callable[..., Tensor], kind: Kind) -> Callable[..., Tensor]:
    """The host's `forward`: query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d].

    Args:
        plain: the host's.
        kind: "sdpa" is torch's fused attention wherever it computes the same, in eval mode too;
            "host" the host's unfused sums, and outside a capture the host itself.
    """

    @functools.wraps(plain)
    def forward(  # noqa: PLR0913 - the host's signature
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        traced = torch.compiler.is_compiling()
        given = attention_bias is not None or packed_seq_params is not None
        fused = kind == "sdpa" and not given and _is_fusible(self)
        if traced and given:
            raise UnsupportedError("a captured layer takes no attention bias and no packed samples")
        if not traced and not fused:
            more = (attn_mask_type, attention_bias, packed_seq_params)
            return plain(self, query, key, value, attention_mask, *more)
        ours = _fused if fused else _unfused
        return ours(self, query, key, value, attention_mask)

    return forward


def _is_fusible(self: Any) -> bool:
    """Whether torch's attention computes the same: plain softmax, and no forked dropout."""
    forked = self.training and self.attention_dropout.p > 0 and not self.config.sequence_parallel
    plain = self.softmax_offset is None and self.scale_mask_softmax.window_size is None
    known = self.attn_mask_type in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.padding)
    return plain and known and not forked


def _fused(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
    scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
    context = F.scaled_dot_product_attention(
        *heads,
        attn_mask=None if mask is None else ~mask,
        dropout_p=self.attention_dropout.p if self.training else 0.0,
        is_causal=mask is None and self.attn_mask_type == AttnMaskType.causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context.permute(2, 0, 1, 3).flatten(2)


def _unfused(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
    rows, batch, heads, _ = query.shape
    query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))
    unread = query.new_zeros(1)  # beta=0: the host hands over scratch memory
    scores = torch.baddbmm(
        unread, query, key.transpose(1, 2), beta=0.0, alpha=self.softmax_scale
    ).unflatten(0, (batch, heads))
    weights = self.scale_mask_softmax(scores, mask, self.softmax_offset)
    p = self.attention_dropout.p
    if self.training and p > 0 and not self.config.sequence_parallel:
        weights, _ = torch.ops.dynaflow.forked_dropout(weights, p)
    else:
        weights = self.attention_dropout(weights)
    context = torch.bmm(weights.flatten(0, 1), value).unflatten(0, (batch, heads))
    return context.permute(2, 0, 1, 3).reshape(rows, batch, -1)
