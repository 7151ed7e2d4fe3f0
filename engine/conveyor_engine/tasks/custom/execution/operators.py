"""Lists the ATen operators that an exported program may call. Used by `graph`.

A listed operator works on dense tensors and changes none, except for those in IN_PLACE. It checks shapes, sizes and
indices itself, because the program's author chooses them. An entry is `name.overload`, or a name for all overloads
without an argument for the result. A name that the installed torch does not have is ignored. A new operator of torch is
refused until it is added here.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

_NUMBERS: Final = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max
clamp_min clip complex copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix float_power
floor floor_divide fmax fmin fmod frac gcd ge greater greater_equal gt heaviside hypot i0 imag isclose isfinite isinf
isnan isneginf isposinf isreal lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt maximum minimum mul multiply nan_to_num ne neg negative
nextafter not_equal polar positive pow rad2deg real reciprocal remainder round rsqrt rsub sgn sign signbit sin sinc
sinh special_entr special_erfcx special_expit special_i0e special_i1 special_i1e special_log_ndtr special_ndtr
special_ndtri special_xlog1py special_zeta sqrt square sub subtract tan tanh true_divide trunc where xlogy
__and__ __lshift__ __or__ __rshift__ __xor__
"""
_ACTIVATIONS: Final = """
_log_softmax _safe_softmax _softmax celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid
log_softmax mish prelu relu relu6 selu sigmoid silu softmax softplus softshrink special_log_softmax special_softmax
threshold
"""
_REDUCTIONS: Final = """
all amax amin aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum diff dist equal logcumsumexp
logsumexp max mean median min mode nanmean nanmedian nansum norm prod std std_mean sum trace var var_mean
"""
_PRODUCTS: Final = """
addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul cdist cosine_similarity cross dot einsum inner kron linear
linalg_cholesky linalg_cross linalg_det linalg_inv linalg_matmul linalg_matrix_norm linalg_multi_dot linalg_norm
linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_vecdot linalg_vector_norm matmul
matrix_power mm mv outer pairwise_distance scaled_dot_product_attention tensordot vdot
"""
_LAYERS: Final = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _native_batch_norm_legit_no_training adaptive_avg_pool1d adaptive_avg_pool2d
adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator alpha_dropout
avg_pool1d avg_pool2d avg_pool3d batch_norm channel_shuffle col2im conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d convolution dropout embedding feature_alpha_dropout feature_dropout
fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2
fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru.input
gru_cell im2col instance_norm istft layer_norm lstm.input lstm_cell max_pool1d max_pool2d max_pool2d_with_indices
max_pool3d max_pool3d_with_indices native_dropout native_layer_norm pixel_shuffle pixel_unshuffle rms_norm
rnn_relu.input rnn_relu_cell rnn_tanh.input rnn_tanh_cell stft upsample_bicubic2d upsample_bilinear2d upsample_linear1d
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
"""
_SHAPES: Final = """
_to_copy adjoint alias atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cartesian_prod cat
chunk clone column_stack concat concatenate conj conj_physical constant_pad_nd contiguous copy detach diag diag_embed
diagflat diagonal diagonal_copy dsplit dstack expand expand_as expand_copy flatten flip fliplr flipud hsplit hstack
lift_fresh lift_fresh_copy mH mT matrix_H meshgrid moveaxis movedim narrow narrow_copy numpy_T pad permute permute_copy
ravel reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d
reshape reshape_as resolve_conj resolve_neg roll rot90 row_stack select select_copy slice slice_copy split
split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t t_copy tensor_split
tile to transpose transpose_copy tril triu type_as unbind unbind_copy unflatten unfold unfold_copy unsqueeze
unsqueeze_copy vander view view_as view_as_complex view_as_real view_copy vsplit vstack
"""
_INDICES: Final = """
argsort argwhere bucketize diagonal_scatter gather index index_add index_copy index_fill index_put index_reduce
index_select isin kthvalue masked_fill masked_scatter masked_select msort nonzero nonzero_numpy nonzero_static one_hot
repeat_interleave scatter scatter_add scatter_reduce searchsorted select_scatter slice_scatter sort take
take_along_dim topk unique_consecutive unique_dim
"""
_MAKERS: Final = """
arange bartlett_window bernoulli blackman_window eye fill full full_like hamming_window hann_window kaiser_window
linspace logspace multinomial new_full new_ones new_zeros normal normal_functional ones ones_like rand rand_like randint
randint_like randn randn_like randperm scalar_tensor tril_indices triu_indices zeros zeros_like
"""
_SIZES: Final = """
_local_scalar_dense item numel size sym_is_contiguous sym_numel sym_size
"""

# Operators that change their first argument, within its bounds. torch.export keeps them.
_IN_PLACE: Final = """
add_ addcdiv_ addcmul_ clamp_ clamp_max_ clamp_min_ copy_ div_ elu_ exp_ fill_ hardsigmoid_ hardswish_ hardtanh_
leaky_relu_ masked_fill_ mish_ mul_ neg_ pow_ relu6_ relu_ rsqrt_ sigmoid_ silu_ sqrt_ sub_ tanh_ zero_
"""

IN_PLACE: Final = frozenset(_IN_PLACE.split())
ALLOWED: Final = IN_PLACE | frozenset(
    (_NUMBERS + _ACTIVATIONS + _REDUCTIONS + _PRODUCTS + _LAYERS + _SHAPES + _INDICES + _MAKERS + _SIZES).split()
)


def _normalize(input: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute _native_batch_norm_legit_no_training by batch_norm, which checks the sizes of the statistics."""
    weight, bias, mean, variance, momentum, eps = rest
    found = torch.batch_norm(input, weight, bias, mean, variance, False, momentum, eps, True)
    return found, input.new_zeros(0), input.new_zeros(0)


def _run_lstm(
    input: torch.Tensor, states: list[torch.Tensor], weights: list[torch.Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Compute lstm, after a check of sizes and types. Neither torch nor oneDNN checks all of them."""
    hidden, ways = states[0].shape[-1], 1 + bidirectional
    own = ways * (2 + 2 * has_biases)  # weights of a layer
    shapes: list[tuple[int, ...]] = [(layers * ways, input.shape[1 - batch_first], hidden)] * 2
    for layer in range(len(weights) // own):
        width = hidden * ways if layer else input.shape[-1]
        shapes += [(4 * hidden, width), (4 * hidden, hidden), *[(4 * hidden,)] * (2 * has_biases)] * ways
    given = [*states, *weights]
    types = {tensor.dtype for tensor in (input, *given)}
    if layers * own != len(weights) or [tuple(each.shape) for each in given] != shapes or len(types) > 1:
        raise ValueError("the states or weights of an lstm have other sizes or types than its input")
    return torch.ops.aten.lstm.input(
        input, states, weights, has_biases, layers, dropout, train, bidirectional, batch_first
    )


def _fits(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether a tensor of this shape can be broadcast to the whole one."""
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(size in (1, other) for size, other in pairs)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """Compute scaled_dot_product_attention, after a check of the sizes. torch's kernels do not check all of them."""
    mask = rest[0] if rest else options.get("attn_mask")
    heads = options.get("enable_gqa", rest[4] if len(rest) > 4 else False) and query.dim() > 3
    batch = slice(0, -3 if heads else -2)
    good = key.shape[:-1] == value.shape[:-1] and query.shape[batch] == key.shape[batch]
    good = good and query.dim() == key.dim() == value.dim() and query.shape[-1] == key.shape[-1]
    good = good and not (heads and (key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]))
    scores = (*query.shape[:-1], key.shape[-2])
    if not good or (mask is not None and not _fits(mask.shape, scores)):
        raise ValueError("the query, key, value or mask of scaled_dot_product_attention have sizes that do not fit")
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, *rest, **options)


CHECKED: Final[Mapping[str, Callable[..., Any]]] = {
    "_native_batch_norm_legit_no_training.default": _normalize, "lstm.input": _run_lstm,
    "scaled_dot_product_attention.default": _attend,
}  # fmt: skip
"""Functions that are called in place of operators that do not check all sizes."""
