"""Tiny models of any architecture in the registries of `transformers`, with inputs for their task."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from check import Training, fill_zeros
from transformers.models.auto import configuration_auto, modeling_auto

BATCH, LENGTH, VOCABULARY, CLASSES, SIDE = 4, 16, 96, 4, 32

# Settings by what they are; a configuration is given those that it has as whole numbers by default.
SIZES: dict[int, str] = {
    1: "first_k_dense_replace num_shared_experts n_shared_experts topk_group n_group num_nextn_predict_layers"
       " moe_num_shared_experts num_dense_layers",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
       " decoder_num_hidden_layers encoder_num_hidden_layers num_key_value_heads num_experts_per_tok moe_topk moe_k top_k"
       " num_kv_heads moe_top_k encoder_num_key_value_heads decoder_num_key_value_heads num_selected_experts"
       " num_conv_pos_embedding_groups mamba_n_groups l_layers x_layers r_layers num_layers_per_stack"
       " num_encoder_attention_heads num_decoder_attention_heads speech_encoder_layers t2u_encoder_layers t2u_decoder_layers"
       " text_encoder_num_layers pred_num_hidden_layers pred_num_attention_heads num_experts_per_token",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"
       " decoder_num_attention_heads encoder_num_attention_heads num_experts num_local_experts n_routed_experts"
       " moe_num_experts num_routed_experts linear_num_key_heads linear_num_value_heads d_conv attn_num_heads"
       " cross_num_attention_heads num_latents num_self_attends_per_block num_cross_attention_heads"
       " num_self_attention_heads",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head"
       " mamba_d_state mamba_n_heads state_size ssm_state_size patch_size mamba_chunk_size chunk_size sliding_window"
       " global_head_dim index_head_dim local_attention d_head kv_channels attention_head_dim head_size mamba_head_dim"
       " rotary_dim num_conv_pos_embeddings num_queries local_transformer_stride attention_head_size",
    16: "q_lora_rank kv_lora_rank projection_dim num_mel_bins hidden_size_per_layer_input projection_hidden_size",
    32: "hidden_size d_model n_embd dim embed_dim hidden_dim emb_dim encoder_hidden_size decoder_hidden_size d_embed"
        " word_embed_proj_dim embedding_size rnn_hidden_size lru_width attention_hidden_size model_dim decoder_dim"
        " cross_attention_hidden_size hidden_channels d_inner_embed token_embedding_size image_size d_latents"
        " crop_size encoder_hidden_dim output_hidden_size",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim d_inner ffn_hidden_size mlp_dim"
        " moe_intermediate_size shared_expert_intermediate_size encoder_intermediate_size decoder_intermediate_size"
        " dim_feedforward dff dim_ff expert_ffn_hidden_size moe_shared_expert_intermediate_size intermediate_size_mlp"
        " shared_intermediate_size max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length"
        " max_source_positions max_target_positions context_length max_seq_length dense_intermediate_size"
        " feed_forward_size moe_ffn_hidden_size max_encoder_position_embeddings max_decoder_position_embeddings",
    VOCABULARY: "vocab_size vocab_size_per_layer_input encoder_vocab_size decoder_vocab_size n_token entity_vocab_size"
                " src_vocab_size tgt_vocab_size",
}
SETTINGS = {name: size for size, names in SIZES.items() for name in names.split()}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "num_kv_shared_layers": 0}
NONE = {"vocab_size": VOCABULARY, "head_dim": 8, "num_key_value_heads": 4}  # where the default is no number
LISTS = {"depths": 1, "num_heads": 2, "num_attention_heads": 2, "hidden_sizes": 16, "embed_dims": 16, "conv_dim": 16,
         "attention_window": 8, "encoder_hidden_sizes": 16, "neck_hidden_sizes": 16, "decoder_depths": 1, "block_sizes": 1,
         "num_block_repeats": 1, "n_attn_blocks": 1, "depth": 1, "image_size": 32}
PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types")  # kinds of layers: one of each is built

# What the rules above do not tell: settings that have to fit each other.
RESNET = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16] * 4, "depths": [1] * 4, "layer_type": "basic"}
DETECTOR = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
            "backbone_config": RESNET | {"out_features": ["stage4"]}}
STAGES = RESNET | {"out_features": ["stage2", "stage3", "stage4"]}
PYRAMID = {"backbone_config": STAGES | {"model_type": "rt_detr_resnet"}, "encoder_in_channels": [16] * 3, "decoder_in_channels": [32] * 3}
HGNET = {"model_type": "hgnet_v2", "embedding_size": 16, "depths": [1] * 4, "hidden_sizes": [16] * 4, "stem_channels": [3, 8, 8],
         "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4, "stage_out_channels": [16] * 4,
         "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [2] * 4}
LINES = {"backbone_config": HGNET | {"out_features": ["stage2", "stage3", "stage4"]}, "encoder_in_channels": [16] * 3,
         "decoder_in_channels": [32] * 3}
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "patch_size": 8, "image_size": 32,
       "out_indices": [1, 2, 3, 4]}
DEPTH = {"backbone_config": VIT | {"model_type": "dinov2", "reshape_hidden_states": False}, "reassemble_hidden_size": 32,
         "patch_size": 8}
SERIES = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1}
ODD: dict[str, dict[str, Any]] = {
    "detr": DETECTOR, "conditional_detr": DETECTOR, "table-transformer": DETECTOR,
    "dab-detr": DETECTOR | {"backbone_config": RESNET},
    "deformable_detr": DETECTOR | {"backbone_config": STAGES},
    "rt_detr": PYRAMID, "rt_detr_v2": PYRAMID, "d_fine": LINES, "deimv2": LINES,
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "depth_anything": DEPTH, "prompt_depth_anything": DEPTH,
    "zoedepth": {"backbone_config": VIT | {"model_type": "beit", "reshape_hidden_states": False}},
    "chmv2": {"backbone_config": VIT | {"model_type": "dinov3_vit", "return_class_token": True}, "patch_size": 8,
              "post_process_channels": [16] * 4},
    "tipsv2_dpt": {"backbone_config": VIT | {"model_type": "tipsv2_vision_model", "reshape_hidden_states": False}},
    "eomt": {"num_blocks": 1}, "eomt_dinov3": {"num_blocks": 1}, "bit": {"num_groups": 4},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4, "input_size": 32}, "lilt": {"hidden_size": 48},
    "blip_2_qformer": {"use_qformer_text_input": True}, "mobilevitv2": {"image_size": 64},
    "hgnet_v2": HGNET, "textnet": {"hidden_sizes": [64, 64, 128, 256, 512]}, "hrm_text": {"use_cache": False},
    "deepseek_v2": {"num_experts_per_tok": 2}, "zamba2": {"attention_hidden_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 16}, "neomme": {"head_dim": 16}, "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "speecht5": {"vocab_size": VOCABULARY}, "speech-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4, "hc_lowrank": 8, "ple_embed_dim": 8, "split_ngram_parts": 2},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}, "align": {"projection_dim": 640},
    "informer": SERIES, "autoformer": SERIES | {"label_length": 4}, "time_series_transformer": SERIES,
    "patchtsmixer": {"context_length": 16, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2,
                     "prediction_length": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "efficientnet": {"hidden_dim": 640, "image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5},
    "bamba": {"attn_layer_indices": [1]}, "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "recurrent_gemma": {"num_hidden_layers": 3}, "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 24, 32], "num_attention_heads": [1, 2, 3], "key_dim": [8] * 3,
              "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]]},
    "led": {"attention_window": [8, 8]}, "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "xmod": {"default_language": "en_XX"},
    "falcon_h1": {"mamba_d_ssm": 64},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
}


def small(config: type, model: str) -> dict[str, Any]:
    """The settings that make `config` tiny, as deep as configurations are nested."""
    found: dict[str, Any] = {}
    default = vars(config())
    for name, value in default.items():
        if isinstance(value, transformers.PreTrainedConfig):
            found[name] = {"model_type": value.model_type} | small(type(value), value.model_type)
        elif name in IDS:
            found[name] = IDS[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            found[name] = 3
        elif value is None and name in NONE:
            found[name] = NONE[name]
        elif type(value) is int and name in SETTINGS:
            found[name] = min(value, SETTINGS[name])
        elif isinstance(value, (list, tuple)) and name in LISTS and value and type(value[0]) is int:
            found[name] = [LISTS[name]] * len(value)
    patterns = {name: default[name] for name in PATTERNS if isinstance(default.get(name), list)}
    if patterns:
        kinds = list(dict.fromkeys(zip(*patterns.values(), strict=False)))
        kinds = kinds if len(kinds) > 1 else kinds * 2
        found |= {name: list(kind) for name, kind in zip(patterns, zip(*kinds))} | {"num_hidden_layers": len(kinds)}
    if found.get("kv_lora_rank"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found | ODD.get(model, {})


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, length))


def next_token(config: Any) -> dict[str, Any]:
    if config.model_type == "perceiver":  # answers at every place that it has
        text = tokens(config.max_position_embeddings)
    else:
        text = tokens()
    return {"input_ids": text, "labels": text}


def translation(config: Any) -> dict[str, Any]:
    if not config.is_encoder_decoder:
        return next_token(config)
    text = tokens()
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": tokens(LENGTH if config.model_type == "fsmt" else 8)}


def text_class(config: Any) -> dict[str, Any]:
    return {"input_ids": tokens(), "labels": torch.randint(CLASSES, (BATCH,))}


def span(config: Any) -> dict[str, Any]:
    if config.model_type == "lxmert":  # of an image's objects
        objects = {"visual_feats": torch.randn(BATCH, 4, config.visual_feat_dim), "visual_pos": torch.rand(BATCH, 4, 4)}
        return {"input_ids": tokens(), "labels": torch.randint(CLASSES, (BATCH,))} | objects
    return {"input_ids": tokens(), "start_positions": torch.randint(LENGTH, (BATCH,)),
            "end_positions": torch.randint(LENGTH, (BATCH,))}


def pixels(config: Any, *frames: int) -> torch.Tensor:
    side = getattr(config, "image_size", None) or SIDE
    height, width = (side, side) if isinstance(side, int) else side
    return torch.randn(BATCH, *frames, getattr(config, "num_channels", 3), height, width)


def image(config: Any) -> dict[str, Any]:
    if config.model_type == "prompt_depth_anything":
        return {"pixel_values": pixels(config), "prompt_depth": torch.rand(BATCH, 1, 8, 8)}
    if config.model_type == "videomt":
        return {"pixel_values_videos": pixels(config, 2)}
    return {"pixel_values": pixels(config)}


def image_class(config: Any) -> dict[str, Any]:
    if config.model_type == "imagegpt":  # of colours, not of pixels
        return text_class(config)
    return {"pixel_values": pixels(config), "labels": torch.randint(CLASSES, (BATCH,))}


def image_classes(config: Any) -> dict[str, Any]:
    values = pixels(config)
    return {"pixel_values": values, "labels": torch.randint(CLASSES, (BATCH, *values.shape[-2:]))}


def depth(config: Any) -> dict[str, Any]:
    return {"pixel_values": pixels(config)}


def video_class(config: Any) -> dict[str, Any]:
    name = "pixel_values_videos" if config.model_type in ("vjepa2", "videoprism_vision_model") else "pixel_values"
    return {name: pixels(config, getattr(config, "num_frames", 4)), "labels": torch.randint(CLASSES, (BATCH,))}


def boxes(config: Any) -> dict[str, Any]:
    labels = [{"class_labels": torch.randint(CLASSES, (2,)), "boxes": torch.rand(2, 4) * 0.4 + 0.3} for _ in range(BATCH)]
    return {"pixel_values": pixels(config), "labels": labels}


def pairs(config: Any) -> dict[str, Any]:
    if config.model_type == "videoprism":
        return {"input_ids": tokens(), "pixel_values_videos": pixels(config.vision_config, 16), "return_loss": True}
    if config.model_type == "blip-2":
        return {"input_ids": tokens(), "pixel_values": pixels(config.vision_config)}
    return {"input_ids": tokens(), "pixel_values": pixels(config.vision_config), "return_loss": True}


def speech(config: Any) -> dict[str, Any]:
    if config.model_type == "wav2vec2-bert":  # of features, not of a wave
        return {"input_features": torch.randn(BATCH, 40, 16), "labels": torch.randint(1, CLASSES + 4, (BATCH, 3))}
    if config.model_type in ("lasr_ctc", "parakeet_ctc"):
        return {"input_features": torch.randn(BATCH, 80, config.encoder_config.num_mel_bins),
                "attention_mask": torch.ones(BATCH, 80, dtype=torch.long),
                "labels": torch.randint(1, CLASSES + 4, (BATCH, 3))}
    return {"input_values": torch.randn(BATCH, 2000), "labels": torch.randint(1, CLASSES + 4, (BATCH, 3))}


def sound_class(config: Any) -> dict[str, Any]:
    if config.model_type == "audio-spectrogram-transformer":
        return {"input_values": torch.randn(BATCH, config.max_length, config.num_mel_bins),
                "labels": torch.randint(CLASSES, (BATCH,))}
    return {"input_values": torch.randn(BATCH, 2000), "labels": torch.randint(CLASSES, (BATCH,))}


def transcription(config: Any) -> dict[str, Any]:
    if config.model_type == "speech_to_text":
        return {"input_features": torch.randn(BATCH, 40, 16), "labels": tokens(8)}
    if config.model_type in ("canary", "cohere_asr"):
        return {"input_features": torch.randn(BATCH, 40, config.encoder_config.num_mel_bins), "labels": tokens(8)}
    if config.model_type in ("moonshine", "moonshine_streaming", "speecht5", "speech-encoder-decoder"):
        return {"input_values": torch.randn(BATCH, 8000), "labels": tokens(8)}
    if config.model_type == "pop2piano":
        return {"input_features": torch.randn(BATCH, 40, config.d_model), "labels": tokens(8)}
    return {"input_features": torch.randn(BATCH, getattr(config, "num_mel_bins", 16), 40), "labels": tokens(8)}


def series(config: Any) -> dict[str, Any]:
    if config.model_type == "patchtsmixer":
        return {"past_values": torch.randn(BATCH, 16, 2), "future_values": torch.randn(BATCH, 8, 2)}
    return {"past_values": torch.randn(BATCH, 18), "past_time_features": torch.randn(BATCH, 18, 1),
            "past_observed_mask": torch.ones(BATCH, 18), "future_values": torch.randn(BATCH, 8),
            "future_time_features": torch.randn(BATCH, 8, 1)}


# Classes that no registry has by their task.
SERIES_MODELS = {"informer": "InformerForPrediction", "autoformer": "AutoformerForPrediction",
                 "time_series_transformer": "TimeSeriesTransformerForPrediction",
                 "patchtsmixer": "PatchTSMixerForPrediction"}

# Registry: inputs of its models, in the order in which a model type is looked for.
TASKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "CAUSAL_LM": next_token, "MASKED_LM": next_token, "SEQ_TO_SEQ_CAUSAL_LM": translation,
    "IMAGE_CLASSIFICATION": image_class, "SEMANTIC_SEGMENTATION": image_classes, "SEQUENCE_CLASSIFICATION": text_class,
    "QUESTION_ANSWERING": span, "VIDEO_CLASSIFICATION": video_class, "OBJECT_DETECTION": boxes,
    "ZERO_SHOT_IMAGE_CLASSIFICATION": pairs, "DEPTH_ESTIMATION": image, "MASKED_IMAGE_MODELING": image, "CTC": speech,
    "AUDIO_CLASSIFICATION": sound_class, "SPEECH_SEQ_2_SEQ": transcription, "UNIVERSAL_SEGMENTATION": image,
    "SERIES": series, "IMAGE_TO_IMAGE": image, "IMAGE": image, "TEXT_ENCODING": lambda config: {"input_ids": tokens()}}


def classes(task: str) -> dict[str, Any]:
    return SERIES_MODELS if task == "SERIES" else getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")


def registered() -> dict[str, str]:
    """The task of each model type that some registry has, tasks in turn, so that a run cut short has some of each."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for task in TASKS:
        names = classes(task)
        for model in names:
            text = f"{model}_text"  # the same class, whose configuration this is
            if model in configuration_auto.CONFIG_MAPPING_NAMES and model not in seen and names.get(text) != names[model]:
                seen.add(model)
                found.setdefault(task, []).append(model)
    turns = itertools.zip_longest(*([(model, task) for model in models] for task, models in found.items()))
    return dict(each for turn in turns for each in turn if each is not None)


def build(name: str, task: str) -> Training:
    kind = configuration_auto.CONFIG_MAPPING[name]
    settings = small(kind, name)
    if any(word in task for word in ("CLASSIFICATION", "SEGMENTATION", "DETECTION")):
        settings |= {"num_labels": CLASSES}
    if "CLASSIFICATION" in task:
        settings |= {"problem_type": "single_label_classification"}
    if task == "CTC":
        settings |= {"mask_time_prob": 0.0, "ctc_loss_reduction": "mean"}  # masks are drawn from NumPy
    config = kind(**settings)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = IDS["decoder_start_token_id"]
    names = classes(task)[name]
    model = getattr(transformers, names if isinstance(names, str) else names[0])(config)
    model = model.to(torch.get_default_dtype()).train()
    fill_zeros(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [TASKS[task](config) for _ in range(8)]

    def step(batch: dict[str, Any]) -> torch.Tensor:
        outputs = model(**batch)
        loss = outputs.loss if getattr(outputs, "loss", None) is not None else outputs[0].square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Training(step, [model], [opt], lambda i: (batches[i],))
