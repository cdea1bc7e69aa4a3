"""Transformers: one small model of every kind, built from its configuration; nothing is downloaded.

Most are built by their type and get the input that their kind takes. Those that want something
else stand in `SEEING` and `READING`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from architectures.base import Architecture, Inputs, ids
from architectures.transformers_builders import by_type
from architectures.transformers_inputs import named, pixels, text
from architectures.transformers_reading import READING
from architectures.transformers_seeing import SEEING

TEXT = (
    "afmoe albert apertus arcee aria_text bart beam bert bert-generation big_bird bigbird_pegasus biogpt bitnet "
    "blenderbot blenderbot-small bloom camembert canine clip_text_model codegen cohere cohere2 convbert cpmant "
    "ctrl cwm data2vec-text deberta deberta-v2 deepseek_v2 deepseek_v3 diffllama distilbert doge dpr electra "
    "ernie ernie4_5 ernie4_5_moe eurobert exaone4 falcon falcon_h1 flaubert flex_olmo fnet fsmt gemma gemma2 "
    "gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granitemoe "
    "gte helium ibert jetmoe jina_embeddings_v3 layoutlm led lfm2 lilt llama llama4_text longformer longt5 "
    "m2m_100 marian markuplm mbart megatron-bert mistral mixtral mobilebert modernbert modernbert-decoder mpnet "
    "mpt mra mt5 mvp nanochat nllb-moe nomic_bert nystromformer olmo olmo2 olmoe openai-gpt opt pegasus pegasus_x "
    "persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma rembert roberta "
    "roberta-prelayernorm roc_bert roformer seed_oss smollm3 splinter squeezebert stablelm starcoder2 "
    "switch_transformers t5 t5gemma tapas umt5 visual_bert xglm xlm xlm-roberta xlm-roberta-xl xlnet yoso"
)
IMAGES = (
    "aimv2_vision_model beit clip_vision_model cvt data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit dpt "
    "focalnet glpn ijepa internvl_vision mlcd_vision_model mobilevit poolformer pvt pvt_v2 radio sam_vision_model "
    "segformer siglip_vision_model swiftformer vit vit_mae vit_msn vitdet yolos"
)
SOUNDS = "data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm"

OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "head_dim": 12,
        "q_lora_rank": None,
        "num_experts_per_tok": 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    },
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "falcon_h1": {"mamba_chunk_size": 8, "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "dinov3_vit": {"pos_embed_rescale": None},
    "segformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "num_attention_heads": [1, 2, 2, 4]},
    "stablelm": {"partial_rotary_factor": 1.0},
}
"""What a type needs besides small numbers."""


def transformers_architectures() -> list[Architecture]:
    """Those of Transformers; a version that does not know a type leaves it out."""
    from transformers import CONFIG_MAPPING

    known = set(CONFIG_MAPPING)
    made = []
    for name in f"{TEXT} {IMAGES} {SOUNDS}".split():
        if name in known:
            size = {"image_size": SIZES[name]} if name in SIZES else {}
            make = by_type(name, **size, **OPTIONS.get(name, {}))
            made.append(Architecture("transformers", name, make, usual(name)))
    return made + [Architecture("transformers", name, *special) for name, special in {**SEEING, **READING}.items()]


def usual(name: str) -> Callable[[], Inputs]:
    """The input that a type takes, of the three usual kinds."""
    if name in IMAGES.split():
        return pixels(SIZES.get(name, 32))
    if name in SOUNDS.split():
        return named(input_values=(2, 1000))
    if name in DECODERS.split():
        return text(decoder_input_ids=ids(seed=2))
    return text()


SIZES = {"cvt": 64, "glpn": 64, "mobilevit": 128, "pvt": 64, "pvt_v2": 64, "segformer": 64}
"""Pyramids want larger images: where a single key is left, attention is 1 whatever is done to it."""
DECODERS = (
    "bart bigbird_pegasus blenderbot blenderbot-small fsmt led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus "
    "pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5"
)
