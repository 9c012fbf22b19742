"""Hugging Face models built from tiny configurations; nothing is downloaded."""

import torch

from zoo.case import ids, keywords, normal, registry

CASES, case = registry()


def ones(*shape):
    return lambda n: torch.ones(n, *shape, dtype=torch.long)


def attention_mask(tokens):
    """Example i pads its last i mod 2 tokens."""
    return lambda n: (torch.arange(tokens)[None] < tokens - (torch.arange(n) % 2)[:, None]).long()


@case(keywords(input_ids=ids(5, 3)), n=2, needs="transformers", fallback_ok=True)
def hf_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=5, n_positions=4, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    )


@case(ids(5, 3), n=3, n2=3, needs="transformers", fallback_ok=True)
def hf_gpt2_classification():
    """A pooled head: the last token of each example."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=6,
        n_positions=4,
        n_embd=4,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=5,
        num_labels=2,
    )
    return GPT2ForSequenceClassification(config)


@case(
    keywords(input_ids=ids(5, 3), attention_mask=attention_mask(3)),
    n=3,
    needs="transformers",
    fallback_ok=True,
)
def hf_bert_classification():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=5,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=5,
        max_position_embeddings=4,
        num_labels=2,
        pad_token_id=0,
    )
    return BertForSequenceClassification(config)


@case(keywords(input_ids=ids(5, 2)), n=2, needs="transformers", fallback_ok=True, inner_float32=True)
def hf_llama():
    """Grouped queries, rotary positions, a root mean square norm that rounds to float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=5,
        hidden_size=4,
        intermediate_size=5,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)


@case(keywords(input_ids=ids(5, 2)), n=2, needs="transformers", fallback_ok=True, inner_float32=True)
def hf_t5_encoder():
    """Relative position buckets from one table, shared by all layers."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=5, d_model=4, d_kv=2, d_ff=5, num_layers=2, num_heads=2, dropout_rate=0.0)
    )


@case(keywords(pixel_values=normal(1, 4, 4)), n=2, needs="transformers", fallback_ok=True)
def hf_vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=5,
        image_size=4,
        patch_size=2,
        num_channels=1,
        num_labels=2,
    )
    return ViTForImageClassification(config)


@case(keywords(input_ids=ids(5, 2)), n=2, needs="transformers", fallback_ok=True, inner_float32=True)
def hf_mamba():
    """A selective state space: depthwise convolution, a scan, parameters in odd operations."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=5,
        hidden_size=4,
        state_size=2,
        num_hidden_layers=1,
        conv_kernel=2,
        expand=1,
        time_step_rank=1,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return MambaForCausalLM(config)
