"""38 Hugging Face architectures with tiny random weights, each with a loss of its own kind.

Every name is a model type of `transformers`; sizes are cut down until the whole set trains on
a CPU in a minute. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from check import Case, Training, fill_zeros

BATCH, LENGTH, VOCABULARY, CLASSES, SIDE = 2, 16, 96, 4, 32

Inputs = Callable[[Any], dict[str, Any]]


def tokens(length: int | None = None) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, LENGTH if length is None else length))


def images(side: int = SIDE) -> torch.Tensor:
    return torch.randn(BATCH, 3, side, side)


def next_token(config: Any) -> dict[str, Any]:
    text = tokens()
    return {"input_ids": text, "labels": text}


def text_class(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
            "labels": torch.randint(CLASSES, (BATCH,))}


def masked_token(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
            "labels": tokens()}


def translation(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": tokens(8)}


def image_class(config: Any) -> dict[str, Any]:
    return {"pixel_values": images(), "labels": torch.randint(CLASSES, (BATCH,))}


def pixels(config: Any) -> dict[str, Any]:
    return {"pixel_values": images(), "labels": torch.randint(CLASSES, (BATCH, SIDE, SIDE))}


def image_alone(config: Any) -> dict[str, Any]:
    return {"pixel_values": images()}


def transcription(config: Any) -> dict[str, Any]:
    return {"input_features": torch.randn(BATCH, 16, 40), "labels": tokens(8)}


def speech(config: Any) -> dict[str, Any]:
    return {"input_values": torch.randn(BATCH, 2000),
            "labels": torch.randint(1, CLASSES + 4, (BATCH, 3))}


def pairs(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "pixel_values": images(), "return_loss": True}


def forecast(config: Any) -> dict[str, Any]:
    return {"past_values": torch.randn(BATCH, 32, 2), "future_values": torch.randn(BATCH, 8, 2)}


def picture_and_text(config: Any) -> dict[str, Any]:
    image = torch.full((BATCH, 16), config.image_token_index)
    text = torch.cat([image, tokens(8)], dim=1)
    labels = text.masked_fill(text == config.image_token_index, -100)
    return {"input_ids": text, "pixel_values": images(), "labels": labels,
            "attention_mask": torch.ones_like(text)}


TEXT = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
            eos_token_id=2)
KEYS = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**KEYS, "num_local_experts": 4, "num_experts_per_tok": 2}
CLASSIFY = {**TEXT, "num_labels": CLASSES}
SIGHT = dict(image_size=SIDE, patch_size=8, hidden_size=32, num_hidden_layers=2,
             num_attention_heads=4, intermediate_size=64)
SEE = {**SIGHT, "num_labels": CLASSES}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}

# model type: (class, settings of its configuration, inputs)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "gpt2": ("AutoModelForCausalLM", dict(vocab_size=VOCABULARY, n_positions=64, n_embd=32,
             n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2), next_token),
    "gpt_neox": ("AutoModelForCausalLM", TEXT, next_token),
    "opt": ("AutoModelForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, next_token),
    "bloom": ("AutoModelForCausalLM", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2,
              n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0), next_token),
    "llama": ("AutoModelForCausalLM", KEYS, next_token),
    "mistral": ("AutoModelForCausalLM", {**KEYS, "sliding_window": 8}, next_token),
    "qwen3": ("AutoModelForCausalLM", KEYS, next_token),
    "gemma3_text": ("AutoModelForCausalLM", {**KEYS, "sliding_window": 8}, next_token),
    "phi3": ("AutoModelForCausalLM", TEXT, next_token),
    "mixtral": ("AutoModelForCausalLM", {**EXPERTS, "output_router_logits": True}, next_token),
    "qwen3_moe": ("AutoModelForCausalLM", {**KEYS, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 32}, next_token),
    "deepseek_v3": ("AutoModelForCausalLM", {**TEXT, "num_key_value_heads": 4,
                    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "q_lora_rank": 16,
                    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8}, next_token),
    "gpt_oss": ("AutoModelForCausalLM", {**EXPERTS, "sliding_window": 8}, next_token),
    "mamba": ("AutoModelForCausalLM", dict(vocab_size=VOCABULARY, hidden_size=32, state_size=4,
              num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2), next_token),
    "mamba2": ("AutoModelForCausalLM", dict(vocab_size=VOCABULARY, hidden_size=32, state_size=8,
               num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=2, chunk_size=8,
               pad_token_id=0, bos_token_id=1, eos_token_id=2), next_token),
    "rwkv": ("AutoModelForCausalLM", dict(vocab_size=VOCABULARY, context_length=64, hidden_size=32,
             num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64,
             bos_token_id=1, eos_token_id=2), next_token),
    "bert": ("AutoModelForSequenceClassification", CLASSIFY, text_class),
    "roberta": ("AutoModelForSequenceClassification", CLASSIFY, text_class),
    "distilbert": ("AutoModelForSequenceClassification", dict(vocab_size=VOCABULARY, dim=32,
                   n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=64,
                   num_labels=CLASSES, pad_token_id=0), text_class),
    "albert": ("AutoModelForSequenceClassification", {**CLASSIFY, "embedding_size": 16}, text_class),
    "deberta-v2": ("AutoModelForSequenceClassification", {**CLASSIFY, **DEBERTA,
                   "problem_type": "single_label_classification"}, text_class),
    "modernbert": ("AutoModelForMaskedLM", {**TEXT, "local_attention": 8, "cls_token_id": 1,
                   "sep_token_id": 2}, masked_token),
    "t5": ("AutoModelForSeq2SeqLM", dict(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64,
           num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0),
           translation),
    "bart": ("AutoModelForSeq2SeqLM", dict(vocab_size=VOCABULARY, d_model=32, encoder_layers=2,
             decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, pad_token_id=0,
             bos_token_id=1, eos_token_id=2, decoder_start_token_id=2), translation),
    "vit": ("AutoModelForImageClassification", SEE, image_class),
    "dinov2": ("AutoModelForImageClassification", {**SEE, "mlp_ratio": 2}, image_class),
    "swin": ("AutoModelForImageClassification", dict(image_size=SIDE, patch_size=2, embed_dim=16,
             depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES), image_class),
    "resnet": ("AutoModelForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 32],
               depths=[1, 1], layer_type="basic", num_labels=CLASSES), image_class),
    "convnext": ("AutoModelForImageClassification", dict(hidden_sizes=[16, 32], depths=[1, 1],
                 num_stages=2, num_labels=CLASSES), image_class),
    "mobilenet_v2": ("AutoModelForImageClassification", dict(image_size=SIDE, depth_multiplier=0.35,
                     num_labels=CLASSES), image_class),
    "segformer": ("AutoModelForSemanticSegmentation", dict(num_encoder_blocks=2, depths=[1, 1],
                  sr_ratios=[4, 2], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
                  num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32,
                  num_labels=CLASSES), pixels),
    "vit_mae": ("AutoModelForPreTraining", {**SIGHT, "decoder_hidden_size": 32,
                "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
                "decoder_intermediate_size": 64}, image_alone),
    "whisper": ("AutoModelForSpeechSeq2Seq", dict(vocab_size=VOCABULARY, d_model=32,
                encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
                max_source_positions=20, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                eos_token_id=2, decoder_start_token_id=3), transcription),
    "wav2vec2": ("AutoModelForCTC", dict(vocab_size=CLASSES + 8, hidden_size=32,
                 num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                 conv_dim=[16, 16, 16], conv_stride=[5, 4, 4], conv_kernel=[10, 4, 4],
                 num_feat_extract_layers=3, num_conv_pos_embeddings=8,
                 num_conv_pos_embedding_groups=4, mask_time_prob=0.0, pad_token_id=0,
                 ctc_loss_reduction="mean"), speech),
    "clip": ("AutoModelForZeroShotImageClassification", dict(text_config={**TEXT,
             "projection_dim": 16}, vision_config={**SIGHT, "projection_dim": 16},
             projection_dim=16), pairs),
    "siglip": ("AutoModelForZeroShotImageClassification", dict(text_config=TEXT,
               vision_config=SIGHT), pairs),
    "patchtst": ("PatchTSTForPrediction", dict(num_input_channels=2, context_length=32,
                 prediction_length=8, patch_length=8, patch_stride=8, d_model=32,
                 num_hidden_layers=2, num_attention_heads=4, ffn_dim=64), forecast),
    "llava": ("AutoModelForImageTextToText", dict(text_config={**KEYS, "model_type": "llama"},
              vision_config={**SIGHT, "model_type": "clip_vision_model", "projection_dim": 16},
              image_token_index=3, vision_feature_select_strategy="default"), picture_and_text),
}

# These run their experts by `torch._grouped_mm`, which knows no float64.
SINGLE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


# The same architectures used in other ways, beside the 38.
VARIANTS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "deberta-v2 (default loss)": ("AutoModelForSequenceClassification", {**CLASSIFY, **DEBERTA},
                                  text_class),
}
TOLERANCES = {"mobilenet_v2": 1e-5, "clip": 1e-8}
NOTES = {"wav2vec2": "SpecAugment off: it draws from NumPy, for which Dynamo has numbers of its own",
         "mobilenet_v2": "bound 1e-5: some gradients are zero but for rounding; `aot_eager` differs by 1e-6 too",
         "clip": "bound 1e-8: the gradient of a key's bias is zero but for rounding, 6e-18 in `exp_avg`",
         "deberta-v2": "`problem_type` set",
         "deberta-v2 (default loss)": "picks the labelled rows by `nonzero`; not one of the 38"}


def build(name: str) -> Training:
    kind, settings, inputs = {**ARCHITECTURES, **VARIANTS}[name]
    config = transformers.AutoConfig.for_model(name.split(" ")[0], **settings)
    cls = getattr(transformers, kind)
    model = cls.from_config(config) if kind.startswith("Auto") else cls(config)
    model = model.to(torch.get_default_dtype()).train()
    fill_zeros(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [inputs(config) for _ in range(8)]

    def step(batch: dict[str, Any]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Training(step, [model], [opt], lambda i: (batches[i],))


def cases() -> list[Case]:
    return [Case(name, partial(build, name), torch.float32 if name in SINGLE else torch.float64,
                 NOTES.get(name, ""), tolerance=TOLERANCES.get(name)) for name in [*ARCHITECTURES, *VARIANTS]]
