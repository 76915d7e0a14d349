"""config.json of released models, in the form in which the hub has them, and folders of several files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.family import as_config, dims_of
from megamoe.apps.hf.import_folder import import_folder
from megamoe.apps.hf.keys import value_of
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.config.shapes import moe_block_numbers
from megamoe.validation.run import section_problems
from tests.support.apps.hf_models import make
from tests.support.apps.hf_training import all_tensors

COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
}
LLAMA3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "output_router_logits": False,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1": (
        LLAMA3,
        {"model.rotary.scaling": "llama3", "model.rotary.low_frequency_factor": 1.0, "model.rope_base": 5e5},
    ),
    "DeepSeek-V3": (
        DEEPSEEK_V3,
        {
            "model.rotary.scaling": "yarn",
            "model.rotary.factor": 40,
            "model.rotary.interleaved": True,
            "model.latent.query_rank": 1536,
            "moe.router.selector.scale": 2.5,
        },
    ),
    "gpt-oss-20b": (
        GPT_OSS,
        {
            "model.attention.window": 128,
            "model.attention.window_blocks": [*range(1, 25, 2)],
            "model.head_size": 64,
            "model.rotary.truncate": False,
            "moe.expert_activation": "swiglu_clamped",
        },
    ),
    "MiniMax-M2": (
        MINIMAX_M2,
        {
            "model.rotary.share": 0.5,
            "model.attention.window": None,
            "model.attention.query_key_norm": "whole",
            "moe.num_shared_experts": 0,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_released_configurations_are_read(case: str) -> None:
    content, expected = CASES[case]
    config = as_config(FAMILIES[content["model_type"]].read({**COMMON, **content}))
    assert {key: value_of(config, key) for key in expected} == expected
    assert not [*section_problems(config, 1, "bf16")]
    if case == "DeepSeek-V3":
        assert moe_block_numbers(config) == [*range(4, 62)]
        (mask,) = config.moe.router.masks
        assert (mask.options.num_groups, mask.options.keep, mask.options.best) == (8, 4, 2)
        dims = dims_of(config, 129280)
        assert (dims["Q"], dims["U"], dims["O"]) == (128 * 192, 128 * 256, 128 * 128)


@pytest.mark.parametrize(
    ("content", "key", "value", "expected"),
    [
        (MINIMAX_M2, "attn_type_list", [1, 0], "1 for each block"),
        (MINIMAX_M2, "shared_intermediate_size", 8, "0"),
        (MINIMAX_M2, "sliding_window", 8, "null"),
        (MINIMAX_M2, "layernorm_mlp_beta", 0.5, "1.0"),
    ],
)
def test_another_value_of_such_a_key_is_refused(
    content: dict[str, Any], key: str, value: Any, expected: str
) -> None:
    words = re.escape(f"{key}: found {value}, expected {expected}; ")
    with pytest.raises(ValueError, match=words):
        FAMILIES[content["model_type"]].read({**COMMON, **content, key: value})


def test_keys_of_every_configuration_of_transformers_are_known() -> None:
    transformers = pytest.importorskip("transformers")
    common = transformers.PreTrainedConfig(problem_type="regression").to_dict()
    known = {name: value for name, value in common.items() if value is not None and name != "model_type"}
    family, content = FAMILIES["deepseek_v3"], {**COMMON, **DEEPSEEK_V3}
    assert family.read({**known, **content}) == family.read(content)
    with pytest.raises(ValueError, match="is_encoder_decoder: found True, expected false"):
        family.read({**content, "is_encoder_decoder": True})


def test_a_folder_of_several_files_is_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    make("qwen3_moe", tmp_path / "one")
    make("qwen3_moe", tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    for name in ("one", "many"):
        import_folder(tmp_path / name, tmp_path / f"{name}_run", report=lambda line: None)
    step = "checkpoints/step_00000000"
    with (
        CheckpointReader(tmp_path / "one_run" / step) as one,
        CheckpointReader(tmp_path / "many_run" / step) as many,
    ):
        assert one.names() == many.names()
        assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())
    export_run(tmp_path / "many_run", tmp_path / "back", shard_bytes=20_000, report=lambda line: None)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    expected, found = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "back")
    assert index["weight_map"].keys() == expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
