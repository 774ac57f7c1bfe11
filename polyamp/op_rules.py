"""Op rules: which dtype class each operation runs in. One table, as data, for all backends.

Rules (docs/spec.md, section 2.3)
- COMPUTE: floating inputs are cast to the policy's compute dtype.
- FLOAT32: floating inputs are cast to float32, and the result stays float32.
- PROMOTE: inputs are cast to the widest floating input.
- PASS: runs in what it is given. An op that the table does not name is PASS.
- Names are neutral: a backend maps its framework's ops to them. The FLOAT32 class follows torch's CUDA autocast list, widened by the
  reductions and statistics that frameworks were measured to get wrong in 16 bits (sum of 6e4, 6e4, -6e4; softmax of 70,000 equal logits).
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["OP_RULES", "OpClass"]


class OpClass(StrEnum):
    """Dtype class of an operation."""

    COMPUTE = "compute"
    FLOAT32 = "float32"
    PROMOTE = "promote"
    PASS = "pass"


_TABLE = {
    OpClass.COMPUTE: """
        matmul einsum linear bmm mv addmm addmv addbmm baddbmm tensordot chain_matmul multi_dot
        conv conv1d conv2d conv3d conv_transpose conv_transpose1d conv_transpose2d conv_transpose3d depthwise_conv separable_conv
        attention scaled_dot_product_attention prelu rnn_cell gru_cell lstm_cell
    """,
    OpClass.FLOAT32: """
        exp expm1 exp2 log log2 log10 log1p pow reciprocal rsqrt sinh cosh tan acos asin erfinv softplus
        softmax log_softmax softmin logsumexp
        sum mean var std prod cumsum cumprod norm normalize renorm dist cdist pdist cosine_similarity
        layer_norm group_norm rms_norm instance_norm batch_norm_statistics
        cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
        multilabel_margin_loss multi_margin_loss soft_margin_loss triplet_margin_loss poisson_nll_loss gaussian_nll_loss ctc_loss
    """,
    OpClass.PROMOTE: """
        add sub mul div addcdiv addcmul atan2 bilinear cat stack concatenate where cross dot grid_sample index_put scatter_add
    """,
    OpClass.PASS: """
        relu gelu silu tanh sigmoid abs neg max min argmax maximum minimum clip reshape transpose broadcast slice gather embedding pad
        dropout max_pool round sign
    """,
}

OP_RULES: dict[str, OpClass] = {op: cls for cls, names in _TABLE.items() for op in names.split()}
