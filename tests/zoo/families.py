"""Families of Hugging Face models at any size, built from configurations; nothing is downloaded.

>>> model, x, outputs = build("bert", TINY, n=3)  # needs transformers
>>> outputs(model, x).shape
torch.Size([3, 3])

`benchmarks/families.py` builds the same families at larger sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = dict[str, Tensor]
Outputs = Callable[[nn.Module, Inputs], Tensor]


@dataclass(frozen=True)
class Size:
    """What the builders read; every family takes the numbers it has a use for."""

    hidden: int  # divisible by 2 * heads
    layers: int
    heads: int
    vocabulary: int
    tokens: int
    image: int  # pixels a side, divisible by 2 * patch
    patch: int  # even
    outputs: int

    @property
    def feed_forward(self) -> int:
        return 2 * self.hidden


TINY = Size(hidden=8, layers=2, heads=2, vocabulary=24, tokens=4, image=8, patch=4, outputs=3)

# Each builder returns the model and the arguments of one call, for n examples.
Builder = Callable[[Size, int], tuple[nn.Module, Inputs]]
BUILDERS: dict[str, Builder] = {}
OUTPUTS: dict[str, Callable[[Size], Outputs]] = {}

# Models that cast to float32 inside, whatever the dtype of their weights. Their kernel is exact to float32 only.
INNER_FLOAT32 = {
    "t5": "T5LayerNorm takes the variance in float32",
    "llama": "LlamaRMSNorm computes in float32",
    "mixtral": "MixtralRMSNorm and the router's softmax compute in float32",
    "qwen2_moe": "Qwen2MoeRMSNorm and the router's softmax compute in float32",
    "mamba": "MambaRMSNorm and the scan compute in float32",
}


def build(
    name: str, size: Size, n: int, dtype: torch.dtype = torch.float64, jitter: float = 0.2
) -> tuple[nn.Module, Inputs, Outputs]:
    """The model in eval mode, x and the outputs to take: the same every time for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = BUILDERS[name](size, n)
        model = model.to(dtype).eval()
        if dtype == torch.float64:
            run_experts(model, "eager")  # the default, grouped_mm, has no float64
        # Gains of one and biases of zero would hide a forgotten gain or bias.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=jitter)
    x = {key: value.to(dtype) if value.is_floating_point() else value for key, value in x.items()}
    return model, x, OUTPUTS[name](size)


def run_experts(model: nn.Module, how: str) -> None:
    """Choose how a mixture runs its experts: "eager" is a loop, "batched_mm" and "grouped_mm" are one product.

    Older transformers have the loop only.
    """
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(how)


def class_scores(size: Size) -> Outputs:
    """The logits of a classifier: (n, outputs)."""
    return lambda model, x: model(**x).logits


def last_token(size: Size) -> Outputs:
    """The first logits of the last token: (n, outputs)."""
    return lambda model, x: model(**x).logits[:, -1, : size.outputs]


def agreement(size: Size) -> Outputs:
    """Image embedding times text embedding, entry by entry; their sum is the cosine of the pair."""

    def product(model: nn.Module, x: Inputs) -> Tensor:
        out = model(**x)
        return out.image_embeds * out.text_embeds

    return product


def family(outputs: Callable[[Size], Outputs]) -> Callable[[Builder], Builder]:
    """Registers a builder under its name, with the outputs to take."""

    def add(builder: Builder) -> Builder:
        BUILDERS[builder.__name__] = builder
        OUTPUTS[builder.__name__] = outputs
        return builder

    return add


# --- inputs


def tokens(size: Size, n: int) -> Tensor:
    # 0, 1 and 2 are the special tokens of most families.
    return torch.randint(3, size.vocabulary, (n, size.tokens))


def pictures(size: Size, n: int) -> Tensor:
    return torch.randn(n, 3, size.image, size.image)


def text(size: Size, n: int) -> Inputs:
    return {"input_ids": tokens(size, n)}


def text_with_mask(size: Size, n: int) -> Inputs:
    """Every second example ends with one token of padding."""
    lengths = size.tokens - torch.arange(n) % 2
    mask = (torch.arange(size.tokens)[None] < lengths[:, None]).long()
    return {"input_ids": tokens(size, n), "attention_mask": mask}


def source_and_target(size: Size, n: int) -> Inputs:
    return {"input_ids": tokens(size, n), "decoder_input_ids": tokens(size, n)}


def images(size: Size, n: int) -> Inputs:
    return {"pixel_values": pictures(size, n)}


# --- options that several configurations share

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def shape(size: Size) -> dict[str, int]:
    return {
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.feed_forward,
    }


def text_encoder(size: Size) -> dict[str, Any]:
    limit = size.tokens + 4  # RoBERTa counts positions from pad_token_id + 1
    return {**shape(size), **SPECIAL, "vocab_size": size.vocabulary, "max_position_embeddings": limit}


def rotary_decoder(size: Size) -> dict[str, Any]:
    return {**text_encoder(size), "num_key_value_heads": max(1, size.heads // 2), "use_cache": False}


def image_encoder(size: Size) -> dict[str, int]:
    return {**shape(size), "image_size": size.image, "patch_size": size.patch}


def encoder_decoder(size: Size) -> dict[str, Any]:
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in {
            "layers": size.layers,
            "attention_heads": size.heads,
            "ffn_dim": size.feed_forward,
        }.items()
    }
    return {**sides, **SPECIAL, "vocab_size": size.vocabulary, "d_model": size.hidden, "use_cache": False}


# --- text


@family(class_scores)
def bert(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**text_encoder(size), num_labels=size.outputs)
    return BertForSequenceClassification(config), text_with_mask(size, n)


@family(class_scores)
def roberta(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Positions are counted over the tokens that are no padding."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(**text_encoder(size), num_labels=size.outputs)
    return RobertaForSequenceClassification(config), text_with_mask(size, n)


@family(class_scores)
def deberta_v2(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Content to position and position to content, with the options of DeBERTa-v3."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        **text_encoder(size),
        num_labels=size.outputs,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        position_buckets=size.tokens,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        type_vocab_size=0,
    )
    return DebertaV2ForSequenceClassification(config), text_with_mask(size, n)


@family(last_token)
def t5(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """One table of relative positions serves all layers; no biases."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=size.vocabulary,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=size.feed_forward,
        num_layers=size.layers,
        num_heads=size.heads,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        use_cache=False,
    )
    return T5ForConditionalGeneration(config), source_and_target(size, n)


@family(last_token)
def bart(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(**encoder_decoder(size), max_position_embeddings=size.tokens)
    return BartForConditionalGeneration(config), source_and_target(size, n)


@family(last_token)
def gpt2(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """The word table is also the last layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.tokens,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        use_cache=False,
        **SPECIAL,
    )
    return GPT2LMHeadModel(config), text(size, n)


@family(last_token)
def llama(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Rotary positions, grouped queries, gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**rotary_decoder(size))), text(size, n)


@family(last_token)
def mixtral(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Each token goes through two of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**rotary_decoder(size), num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config), text(size, n)


@family(last_token)
def qwen2_moe(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Two of four experts a token, and one expert that all tokens share."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **rotary_decoder(size),
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=size.hidden,
        shared_expert_intermediate_size=size.hidden,
    )
    return Qwen2MoeForCausalLM(config), text(size, n)


@family(last_token)
def mamba(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """A selective state space: depthwise convolution and a scan over the tokens."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        state_size=4,
        conv_kernel=3,
        time_step_rank=2,
        use_cache=False,
        **SPECIAL,
    )
    return MambaForCausalLM(config), text(size, n)


# --- images


@family(class_scores)
def vit(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**image_encoder(size), num_labels=size.outputs)
    return ViTForImageClassification(config), images(size, n)


@family(class_scores)
def beit(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Relative position bias in each layer, a gain on each residual branch, mean pooling."""
    from transformers import BeitConfig, BeitForImageClassification

    config = BeitConfig(**image_encoder(size), num_labels=size.outputs, use_relative_position_bias=True)
    return BeitForImageClassification(config), images(size, n)


@family(class_scores)
def swin(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Two stages; the windows of the second block are shifted."""
    from transformers import SwinConfig, SwinForImageClassification

    patch = size.patch // 2
    config = SwinConfig(
        image_size=size.image,
        patch_size=patch,
        embed_dim=size.hidden,
        depths=[2, size.layers],
        num_heads=[size.heads, size.heads],
        window_size=max(2, size.image // patch // 4),
        mlp_ratio=2.0,
        num_labels=size.outputs,
    )
    return SwinForImageClassification(config), images(size, n)


@family(class_scores)
def convnext(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Depthwise 7x7 convolutions, two stages."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        image_size=size.image,
        patch_size=size.patch // 2,
        num_stages=2,
        hidden_sizes=[size.hidden, 2 * size.hidden],
        depths=[1, size.layers],
        num_labels=size.outputs,
    )
    return ConvNextForImageClassification(config), images(size, n)


# --- two kinds of input


@family(agreement)
def clip(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """An image tower and a text tower; example i is image i with text i."""
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={**text_encoder(size), "projection_dim": size.outputs},
        vision_config={**image_encoder(size), "projection_dim": size.outputs},
        projection_dim=size.outputs,
    )
    return CLIPModel(config), {**text(size, n), **images(size, n)}


@family(last_token)
def whisper(size: Size, n: int) -> tuple[nn.Module, Inputs]:
    """Sound through two convolutions and an encoder; the decoder writes text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **encoder_decoder(size),
        num_mel_bins=size.hidden,
        max_source_positions=size.tokens,
        max_target_positions=size.tokens,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    sound = torch.randn(n, size.hidden, 2 * size.tokens)
    x = {"input_features": sound, "decoder_input_ids": tokens(size, n)}
    return WhisperForConditionalGeneration(config), x
