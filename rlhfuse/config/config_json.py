"""The keys of a Hugging Face config.json: what each family takes for one that is left out, and which change nothing.

Defaults are those of transformers' configuration classes. Whoever reads a config.json reads a key, finds it here among
those without effect on what a model computes, or refuses it by name.
"""

from __future__ import annotations

from typing import Any

ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}
_ALL = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, rms_norm_eps=1e-6, hidden_act="silu")
_ALL |= dict(tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
_OLD = _ALL | dict(vocab_size=32000, bos_token_id=1, eos_token_id=2)
_QWEN = _ALL | dict(vocab_size=151936, intermediate_size=22016, num_key_value_heads=32, max_position_embeddings=32768)
_QWEN |= dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28)
_LLAMA = dict(intermediate_size=11008, num_key_value_heads=None, head_dim=None, max_position_embeddings=2048)
_MISTRAL = dict(intermediate_size=14336, num_key_value_heads=8, head_dim=None, max_position_embeddings=131072)
_PHI3 = dict(intermediate_size=8192, num_key_value_heads=None, max_position_embeddings=4096, sliding_window=None)
DEFAULTS: dict[str, dict[str, Any]] = {  # by family, of the keys that its class has
    "llama": _OLD | _LLAMA | dict(attention_bias=False, mlp_bias=False),
    "mistral": _OLD | _MISTRAL | dict(sliding_window=4096),
    "qwen2": _QWEN,
    "qwen3": _QWEN | dict(head_dim=128, attention_bias=False),
    "phi3": _OLD | _PHI3 | dict(vocab_size=32064, hidden_size=3072, rms_norm_eps=1e-5, eos_token_id=32000),
}
# Where null stands for nothing and is refused, as by transformers, beside the keys of DEFAULTS that are no null.
NOT_NULL = dict(num_key_value_heads=("mistral",), head_dim=("qwen2", "qwen3", "phi3"), partial_rotary_factor=("phi3",))
NOT_NULL |= dict.fromkeys(("rope_theta", "hidden_act"), tuple(ARCHITECTURES))
# Keys that change what a model computes, and the only value of each that is implemented.
IMPLEMENTED: dict[str, Any] = dict(hidden_act="silu", mlp_bias=False, partial_rotary_factor=1, quantization_config=None)
IMPLEMENTED |= dict(is_causal=True, is_encoder_decoder=False, use_mrope=False)
WITHOUT_EFFECT = frozenset(  # as are names that begin with _: notes, then of training, then of generation
    """transformers_version auto_map torch_dtype dtype tokenizer_class name_or_path attn_implementation return_dict
    output_hidden_states output_attentions torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward is_decoder
    add_cross_attention cross_attention_hidden_size tie_encoder_decoder finetuning_task task_specific_params prefix
    problem_type id2label label2id num_labels gradient_checkpointing transformers.js_config unsloth_version
    unsloth_fixed max_sequence_length model_max_length use_flash_attention
    initializer_range attention_dropout resid_pdrop embd_pdrop hidden_dropout classifier_dropout pretraining_tp
    pad_token_id sep_token_id decoder_start_token_id cache_implementation use_cache do_sample early_stopping
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
    encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens target_lookbehind temperature top_k top_p typical_p""".split()
)
