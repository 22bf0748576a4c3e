"""The schema of `config.json`: what is read of it, here and by transformers, under the names of all model types.

Bounds are those of sense, far beyond published models: what is outside is damaged or hostile.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from services.models.files.numbers import (
    Context,
    Epsilon,
    Experts,
    Factor,
    FactorOrZero,
    FileSchema,
    Heads,
    HeadsOfLayers,
    Layer,
    Layers,
    Multiplier,
    PositiveShare,
    RotationBase,
    Share,
    Size,
    SizeOrNone,
    Sizes,
    TokenIdOrNone,
    TokenIds,
    Window,
    said,
)
from services.runtime.http.validation import EXPECTED

_MOST_DIGITS = 8


class Rotation(FileSchema):
    """How queries and keys are rotated by their positions."""

    rope_type: str | None = said("the kind of scaling")
    type: str | None = said("the kind of scaling, in older files")
    rope_theta: RotationBase | None = said("the base of the rotations")
    factor: Factor | None = said("by how much the context is extended")
    partial_rotary_factor: PositiveShare | None = said("the part of a head that is rotated")
    original_max_position_embeddings: Context | None = said("the context before scaling")
    attention_factor: Factor | None = said("by how much scaling multiplies rotations")
    low_freq_factor: Factor | None = said("up to which frequencies rotations are scaled fully")
    high_freq_factor: Factor | None = said("from which frequencies on rotations are not scaled")
    beta_fast: Factor | None = said("rotations over the original context that are not scaled")
    beta_slow: Factor | None = said("rotations over the original context that are scaled fully")
    mscale: FactorOrZero | None = said("the factor of attention scores with YaRN")
    mscale_all_dim: FactorOrZero | None = said("the divisor of attention scores with YaRN")
    short_factor: list[Factor] | None = said("divisors of the frequencies within the original context")
    long_factor: list[Factor] | None = said("divisors of the frequencies beyond the original context")
    mrope_section: list[SizeOrNone] | None = said("frequencies of time, height and width")


def _form(value: Any) -> str:
    """Return whether rotations are those of all layers, or one for each type of layers."""
    if isinstance(value, dict) and value and all(isinstance(part, dict) for part in value.values()):
        return "by type"
    return "of all"


Rotations = Annotated[
    Annotated[Rotation, Tag("of all")] | Annotated[dict[str, Rotation], Tag("by type")], Discriminator(_form)
]


class Quantization(FileSchema):
    """How weights are quantized."""

    quant_method: str | None = said("the method")
    bits: Annotated[float, Field(gt=0, le=32)] | None = said("bits of a weight")
    w_bit: Annotated[float, Field(gt=0, le=32)] | None = said("bits of a weight, in files of AWQ")
    group_size: Annotated[int, Field(ge=-1, le=1 << 24)] | None = said("weights with a common scale")


WeightType = Literal[
    "bfloat16",
    "float16",
    "half",
    "float32",
    "float",
    "float64",
    "double",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
]
"""Names of types in torch."""


def _is_number(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS):
        raise PydanticCustomError(EXPECTED, "under a number")
    return key


NumberKey = Annotated[str, AfterValidator(_is_number)]
"""The number of a layer or of a class."""


class ModelConfig(FileSchema):
    """The configuration of a model, or of its text part."""

    # What it is
    model_type: str | None = said("the name of the architecture in transformers")
    architectures: list[str] | None = said("classes of transformers")
    torch_dtype: WeightType | None = said("the type of the weights")
    dtype: WeightType | None = said("the type of the weights")
    id2label: dict[NumberKey, Any] | None = said("names of classes")
    num_labels: Annotated[int, Field(ge=0, le=1 << 20)] | None = said("how many classes there are")

    # Widths
    vocab_size: Size | None = said("tokens of the vocabulary")
    vocab_size_per_layer_input: Size | None = said("tokens that have embeddings by layer")
    hidden_size: Sizes | None = said("elements of a token's state")
    n_embd: Size | None = said("elements of a token's state")
    d_model: Size | None = said("elements of a token's state")
    embedding_size: Size | None = said("elements of a token's embedding")
    word_embed_proj_dim: Size | None = said("elements of a token's embedding")
    intermediate_size: Sizes | None = said("elements inside the MLP")
    ffn_dim: Size | None = said("elements inside the MLP")
    ffn_hidden_size: Size | None = said("elements inside the MLP")
    n_inner: Size | None = said("elements inside the MLP")
    d_inner: Size | None = said("elements inside the MLP")

    # Layers and heads
    num_hidden_layers: Layers | None = said("layers")
    n_layer: Layers | None = said("layers")
    n_layers: Layers | None = said("layers")
    num_layers: Layers | None = said("layers")
    num_layers_per_stack: Layers | None = said("layers of a stack that is run several times")
    H_cycles: Layers | None = said("how often a stack is run")
    L_cycles: Layers | None = said("how often a stack is run for each time of the other")
    num_attention_heads: HeadsOfLayers | None = said("attention heads of a layer")
    n_head: Heads | None = said("attention heads of a layer")
    n_heads: Heads | None = said("attention heads of a layer")
    num_heads: Heads | None = said("attention heads of a layer")
    num_key_value_heads: HeadsOfLayers | None = said("heads of keys and values of a layer")
    num_kv_heads: HeadsOfLayers | None = said("heads of keys and values of a layer")
    head_dim: Size | None = said("elements of a head")
    v_head_dim: Size | None = said("elements of a head's value")
    kv_channels: Size | None = said("elements of a head")
    qk_nope_head_dim: SizeOrNone | None = said("elements of a head that are not rotated")
    qk_rope_head_dim: SizeOrNone | None = said("elements of a head that are rotated")
    kv_lora_rank: Size | None = said("elements of compressed keys and values")
    q_lora_rank: SizeOrNone | None = said("elements of compressed queries")
    layer_types: list[str] | None = said("the type of each layer")
    per_layer_config: dict[NumberKey, dict[str, Any]] | None = said("other values of certain layers")
    no_rope_layers: list[Layer] | None = said("for each layer whether it rotates")
    no_rope_layer_interval: Layer | None = said("every how many layers one does not rotate")

    # Positions
    max_position_embeddings: Context | None = said("tokens of the context")
    n_positions: Context | None = said("tokens of the context")
    max_seq_len: Context | None = said("tokens of the context")
    seq_length: Context | None = said("tokens of the context")
    original_max_position_embeddings: Context | None = said("the context before scaling")
    rope_theta: RotationBase | None = said("the base of the rotations")
    rotary_emb_base: RotationBase | None = said("the base of the rotations")
    rope_local_base_freq: RotationBase | None = said("the base of the rotations in layers with a window")
    rope_parameters: Rotations | None = said("the rotations by positions")
    rope_scaling: Rotations | None = said("the scaling of rotations")
    partial_rotary_factor: PositiveShare | None = said("the part of a head that is rotated")
    rotary_pct: PositiveShare | None = said("the part of a head that is rotated")
    rotary_dim: Size | None = said("elements of a head that are rotated")

    # Windows
    sliding_window: Window | list[Window] | None = said("tokens that a token sees")
    use_sliding_window: bool | None = said("whether there is a window")
    num_kv_shared_layers: Layer | None = said("layers at the end that use the keys and values of others")
    max_window_layers: Layer | None = said("the first layer with a window")
    sliding_window_pattern: Layer | str | None = said("every how many layers one has no window")
    window_size: Window | list[Window] | None = said("tokens that a token sees")
    attention_chunk_size: Context | None = said("tokens of a chunk of attention")

    # Numerics
    rms_norm_eps: Epsilon | None = said("added to the mean square before the root")
    layer_norm_eps: Epsilon | None = said("added to the variance before the root")
    layer_norm_epsilon: Epsilon | None = said("added to the variance before the root")
    norm_epsilon: Epsilon | None = said("added to the variance before the root")
    norm_eps: Epsilon | None = said("added to the variance before the root")
    attn_logit_softcapping: Factor | None = said("the cap of attention scores")
    final_logit_softcapping: Factor | None = said("the cap of logits")
    query_pre_attn_scalar: Factor | None = said("attention scores are divided by its root")
    attention_multiplier: Multiplier | None = said("the factor of attention scores")
    embedding_multiplier: Multiplier | None = said("the factor of embeddings")
    residual_multiplier: Multiplier | None = said("the factor of what a layer adds")
    logits_scaling: Factor | None = said("the divisor of logits")
    logit_scale: Multiplier | None = said("the factor of logits")
    clip_qkv: Factor | None = said("the cap of queries, keys and values")
    initializer_range: FactorOrZero | None = said("the deviation of random weights")
    attention_dropout: Share | None = said("the part of attention dropped in training")
    hidden_dropout: Share | None = said("the part of states dropped in training")
    resid_pdrop: Share | None = said("the part of states dropped in training")
    embd_pdrop: Share | None = said("the part of embeddings dropped in training")
    attn_pdrop: Share | None = said("the part of attention dropped in training")
    embedding_dropout: Share | None = said("the part of embeddings dropped in training")
    residual_dropout: Share | None = said("the part of states dropped in training")
    activation_dropout: Share | None = said("the part of activations dropped in training")
    dropout: Share | None = said("the part of states dropped in training")
    layerdrop: Share | None = said("the part of layers dropped in training")

    # Experts
    num_experts: Experts | None = said("experts of a layer")
    num_local_experts: Experts | None = said("experts of a layer")
    n_routed_experts: Experts | None = said("experts of a layer")
    moe_num_experts: Experts | None = said("experts of a layer")
    num_experts_per_tok: Experts | None = said("experts of a token")
    num_experts_per_token: Experts | None = said("experts of a token")
    n_shared_experts: Experts | None = said("experts of all tokens")
    moe_intermediate_size: Sizes | None = said("elements inside an expert")
    shared_expert_intermediate_size: SizeOrNone | None = said("elements inside the expert of all tokens")
    shared_intermediate_size: SizeOrNone | None = said("elements inside the expert of all tokens")
    decoder_sparse_step: Layers | None = said("every how many layers one has experts")
    mlp_only_layers: list[Layer] | None = said("layers without experts")
    first_k_dense_replace: Layer | None = said("layers without experts at the start")
    n_group: Experts | None = said("groups of experts")
    topk_group: Experts | None = said("groups of experts of a token")
    routed_scaling_factor: Multiplier | None = said("the factor of the experts' sum")
    router_aux_loss_coef: Multiplier | None = said("the weight of a loss in training")
    router_jitter_noise: FactorOrZero | None = said("noise of the router in training")

    # Tokens
    bos_token_id: TokenIdOrNone | list[TokenIdOrNone] | None = said("the token at the start of a text")
    eos_token_id: TokenIds | None = said("the tokens that end a text")
    pad_token_id: TokenIdOrNone | None = said("the token that fills batches")

    # Parts
    text_config: "ModelConfig | None" = said("the text part of a model of several kinds of input")
    quantization_config: Quantization | None = said("how the weights are quantized")
    compression_config: Quantization | None = said("how the weights are quantized")
