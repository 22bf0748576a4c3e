"""Checks numbers of a configuration that depend on each other."""

from collections.abc import Iterator, Mapping
from typing import Any

from services.models.files.bounded_json import InvalidModelFile

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Methods of choosing experts that look at the best expert of a group only; others add its best two.
_BEST_OF_A_GROUP = ("greedy", "group_limited_greedy")

Config = Mapping[str, Any]


def check_relations(name: str, config: Config) -> None:
    """Check numbers of a configuration, or of its text part, in the file `name`. Raises InvalidModelFile."""
    for check in (_ends, _padding, _heads, _rotated, _experts, _groups, _windows, _shared_layers):
        for fault in check(config):
            raise InvalidModelFile(f"{name}: {fault}")


def check_ends(name: str, ends: Config, vocabulary: int | None) -> None:
    """Check that a file's ends of texts are tokens of the vocabulary. Raises InvalidModelFile."""
    for fault in _ends({**ends, "vocab_size": vocabulary}):
        raise InvalidModelFile(f"{name}: {fault}")


def _ends(config: Config) -> Iterator[str]:
    declared, vocabulary = config.get("eos_token_id"), config.get("vocab_size")
    for token in declared if isinstance(declared, list) else [declared]:
        if token is not None and vocabulary and token >= vocabulary:
            yield f"eos_token_id is {token}, but vocab_size is {vocabulary}"


def _padding(config: Config) -> Iterator[str]:
    padding, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if padding is not None and vocabulary and padding >= vocabulary:
        yield f"pad_token_id is {padding}, but vocab_size is {vocabulary}"


def _heads(config: Config) -> Iterator[str]:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        yield f"num_key_value_heads is {kv_heads}, which {heads} attention heads cannot share"


def _rotated(config: Config) -> Iterator[str]:
    rotated = config.get("qk_rope_head_dim")
    if rotated and rotated % 2:
        yield f"qk_rope_head_dim is {rotated}, but elements are rotated in pairs"


def _experts(config: Config) -> Iterator[str]:
    chosen = config.get("num_experts_per_tok")
    for name, experts in _declared_experts(config):
        if chosen is not None and not 0 < chosen <= experts:
            yield f"num_experts_per_tok is {chosen}, but {name} is {experts}"


def _groups(config: Config) -> Iterator[str]:
    groups, chosen = config.get("n_group") or 1, config.get("topk_group")
    if groups > 1 and chosen is not None and not 0 < chosen <= groups:
        yield f"topk_group is {chosen}, but n_group is {groups}"
    for name, experts in _declared_experts(config) if groups > 1 else ():
        if experts % groups:
            yield f"n_group is {groups}, which does not divide {name}, {experts}"
        if experts == groups and config.get("topk_method") not in _BEST_OF_A_GROUP:
            yield f"n_group is {groups}, but {name} is {experts}: a group must have at least 2 experts"


def _windows(config: Config) -> Iterator[str]:
    window, layers = config.get("sliding_window", 1), config.get("layer_types") or ()
    if not window and "sliding_attention" in layers:
        found = "null" if window is None else window
        yield f"sliding_window must be at least 1, not {found}: layer_types names layers with a window"


def _shared_layers(config: Config) -> Iterator[str]:
    shared, layers = config.get("num_kv_shared_layers"), config.get("num_hidden_layers")
    if shared and layers and shared >= layers:
        yield f"num_kv_shared_layers is {shared}, but num_hidden_layers is {layers}: the first layer has its own"


def _declared_experts(config: Config) -> Iterator[tuple[str, int]]:
    return ((name, config[name]) for name in EXPERTS if config.get(name))
